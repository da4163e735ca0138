"""A causal language model seen as what training needs: log-probabilities of trained tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trinity.trainer.backends.torch import attention
from trinity.trainer.backends.torch.head import HeadSpec, token_logprobs
from trinity.trainer.backends.torch.packing import PackedRows, pack_rows
from trinity.trainer.batch import TrainBatch


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says of the trained tokens of a micro-batch; tensors [M]."""

    packed: PackedRows
    values: Mapping[str, Tensor]

    def by_row(self, batch: TrainBatch) -> dict[str, Tensor]:
        """The same as [B, T], 0 where masked."""
        return {name: self.packed.scatter(value, batch) for name, value in self.values.items()}


class Policy:
    """Runs a model over packed rows.

    Args:
        model: A causal model of transformers, on its device.
        temperature: Of the sampling distribution; rows with a ``temperature`` column of their own
            come first. 0, greedy sampling, counts as 1.
        shares_prefixes: Compute what rows of a group begin with alike once.
    """

    def __init__(
        self, model: PreTrainedModel, temperature: float = 1.0, shares_prefixes: bool = True
    ) -> None:
        attention.register()
        model.set_attn_implementation(attention.IMPLEMENTATION)
        self.model = model
        self.shares_prefixes = shares_prefixes
        self._temperature = temperature
        self._backbone: nn.Module = model.get_decoder()
        head: nn.Module = model.get_output_embeddings()
        self._scale, self._softcap = _logit_rule(model)
        if getattr(head, "bias", None) is not None:
            raise ValueError(
                f"{type(model).__name__} has an output layer with a bias; unsupported."
            )

    @property
    def _head_weight(self) -> Tensor:
        weight = self.model.get_output_embeddings().weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def device(self) -> torch.device:
        return self.model.device

    def token_outputs(self, batch: TrainBatch, entropy: bool = False) -> TokenOutputs:
        """``logprob`` (and ``entropy``) of every trained token, differentiable."""
        packed = pack_rows(batch, self.shares_prefixes)
        hidden = self._hidden(packed)
        spec = HeadSpec(self._scale, self._softcap, entropy)
        logprob, entropies = token_logprobs(
            hidden, self._head_weight, packed.target, self._temperatures(batch, packed), spec
        )
        values = {"logprob": logprob} | ({"entropy": entropies} if entropy else {})
        return TokenOutputs(packed, values)

    def _hidden(self, packed: PackedRows) -> Tensor:
        """[M, D] output of the last layer where trained tokens are predicted."""
        outputs = self._backbone(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            attention_plan=attention.plan_attention(packed),
        )
        return outputs.last_hidden_state[0].index_select(0, packed.source)

    def _temperatures(self, batch: TrainBatch, packed: PackedRows) -> Tensor:
        if "temperature" in batch:
            temperature = batch["temperature"].float()[packed.row]
        else:
            temperature = torch.full((len(packed.row),), self._temperature)
        return torch.where(temperature > 0, temperature, 1.0)


def _logit_rule(model: PreTrainedModel) -> tuple[float, float | None]:
    """Divisor and bound of the logits, by the config's own names."""
    config = model.config
    scale = 1.0
    if getattr(config, "logits_scaling", None):
        scale = float(config.logits_scaling)
    if getattr(config, "logit_scale", None):
        scale = 1 / float(config.logit_scale)
    return scale, getattr(config, "final_logit_softcapping", None)
