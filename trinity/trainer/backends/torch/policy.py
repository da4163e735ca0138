"""A causal language model seen as what training needs: log-probabilities of trained tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trinity.trainer.backends.torch import attention
from trinity.trainer.backends.torch.head import HeadSpec, max_chunk, token_logprobs
from trinity.trainer.backends.torch.packing import PackedRows, TrainedTokens, pack_rows
from trinity.trainer.batch import TrainBatch


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says of the trained tokens of a micro-batch; tensors [M]."""

    trained: TrainedTokens
    values: Mapping[str, Tensor]

    def by_row(self, batch: TrainBatch) -> dict[str, Tensor]:
        """The same as [B, T], 0 where masked."""
        return {name: self.trained.scatter(value, batch) for name, value in self.values.items()}


@dataclass(frozen=True)
class HeadChunk:
    """Rows of a micro-batch whose logits are held together, and where their tokens are in [M]."""

    rows: list[int]
    tokens: slice


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
        hidden = self.hidden(packed)
        return self.head(hidden, packed.trained, batch, entropy)

    def hidden(self, packed: PackedRows) -> Tensor:
        """[M, D] output of the last layer where trained tokens are predicted."""
        outputs = self._backbone(
            input_ids=packed.token_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            attention_plan=attention.plan_attention(packed),
        )
        return outputs.last_hidden_state[0].index_select(0, packed.source)

    def head(
        self, hidden: Tensor, trained: TrainedTokens, batch: TrainBatch, entropy: bool
    ) -> TokenOutputs:
        """``logprob`` (and ``entropy``) of trained tokens from their `hidden`."""
        spec = HeadSpec(self._scale, self._softcap, entropy)
        temperature = self._temperatures(batch, trained.row)
        logprob, entropies = token_logprobs(
            hidden, self._head_weight, trained.target, temperature, spec
        )
        values = {"logprob": logprob} | ({"entropy": entropies} if entropy else {})
        return TokenOutputs(trained, values)

    def head_chunks(self, batch: TrainBatch) -> Iterator[HeadChunk]:
        """The rows of a packed batch in order, so many at a time as have logits in one chunk."""
        bound = max_chunk(len(self._head_weight))
        count_B = batch["action_mask"].sum(dim=1).tolist()
        rows: list[int] = []
        start = num_tokens = 0
        for unit in batch.units():
            added = sum(count_B[row] for row in unit)
            if rows and num_tokens + added > bound:
                yield HeadChunk(rows, slice(start, start + num_tokens))
                rows, start, num_tokens = [], start + num_tokens, 0
            rows = rows + unit
            num_tokens += added
        yield HeadChunk(rows, slice(start, start + num_tokens))

    def _temperatures(self, batch: TrainBatch, row: Tensor) -> Tensor:
        if "temperature" in batch:
            temperature = batch["temperature"].float()[row]
        else:
            temperature = torch.full((len(row),), self._temperature)
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
