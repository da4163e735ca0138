"""`Policy`: a causal language model as log-probabilities and entropies of trained tokens."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trinity.trainer.backends.torch.head import (
    HeadSpec,
    expected_entropy_scores,
    max_chunk,
    token_logprobs,
)
from trinity.trainer.backends.torch.packed_model import PackedModel, TokenOutputs, check_width
from trinity.trainer.backends.torch.packing import TrainedTokens
from trinity.trainer.backends.torch.varlen import sent
from trinity.trainer.batch import TrainBatch


class Policy(PackedModel):
    """Gives ``logprob`` and, if asked, ``entropy`` and ``necs`` (`expected_entropy_scores`).

    Args:
        model: A causal model of transformers, on its device.
        temperature: Of the sampling distribution, for rows that have none of their own in the
            column ``temperature`` (0 there). 0, greedy sampling, counts as 1.
        shares_prefixes: Compute what rows of a group begin with alike once.
        scores_entropy: Give ``necs`` beside the entropy, where no gradient is wanted.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float = 1.0,
        shares_prefixes: bool = True,
        scores_entropy: bool = False,
    ) -> None:
        super().__init__(model, model.get_decoder(), shares_prefixes)
        self._temperature = temperature
        self._scores_entropy = scores_entropy
        self._scale, self._softcap = _logit_rule(model)
        if getattr(model.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(
                f"{type(model).__name__} has an output layer with a bias; unsupported."
            )
        check_width(model, self._weight)

    @property
    def _weight(self) -> Tensor:
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def chunk_size(self) -> int:
        return max_chunk(len(self._weight), self.device)

    def outputs(
        self, hidden: Tensor, trained: TrainedTokens, batch: TrainBatch, entropy: bool
    ) -> TokenOutputs:
        spec = HeadSpec(self._scale, self._softcap, entropy)
        temperature = sent(self._temperatures(batch, trained.row), hidden.device)
        target = sent(trained.target, hidden.device)
        weight = self._weight if self.trains_head else self._weight.detach()
        logprob, entropies = token_logprobs(hidden, weight, target, temperature, spec)
        values = {"logprob": logprob} | ({"entropy": entropies} if entropy else {})
        if entropy and self._scores_entropy and not torch.is_grad_enabled():
            values["necs"] = expected_entropy_scores(hidden, weight, temperature, spec)
        return TokenOutputs(trained, values)

    def _temperatures(self, batch: TrainBatch, row: Tensor) -> Tensor:
        default = self._temperature or 1.0
        if "temperature" not in batch:
            return torch.full((len(row),), default)
        own = batch["temperature"].float()[row]
        return torch.where(own > 0, own, default)


_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def _logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """Divisor and bound of the logits, by the config's own names."""
    config = model.config.get_text_config()
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    if config.model_type.startswith("hyperclovax"):  # by that name others divide
        divisor = 1 / divisor
    for name in _MULTIPLIERS:
        divisor /= float(getattr(config, name, None) or 1.0)
    return divisor, getattr(config, "final_logit_softcapping", None)
