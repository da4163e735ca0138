"""`PackedModel`: a transformer run over packed rows, and what it says of their trained tokens."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from trinity.common.constants import ROUTES
from trinity.common.models.gradients import gradient_of_master
from trinity.common.models.loading import attention_of_text, image_features
from trinity.common.models.routes import Routers
from trinity.common.models.vision import PIXELS
from trinity.trainer.backends.torch import attention, attention_plan, sequence_parallel
from trinity.trainer.backends.torch.gathering import Gathering
from trinity.trainer.backends.torch.packing import (
    PackedImages,
    PackedRows,
    TrainedTokens,
    pack_images,
    pack_routes,
    pack_rows,
)
from trinity.trainer.backends.torch.varlen import sent
from trinity.trainer.batch import TrainBatch

if TYPE_CHECKING:
    from trinity.trainer.backends.torch.sequence_parallel import SequenceGroup
    from trinity.trainer.backends.torch.sharding import Ranks


@dataclass(frozen=True)
class TokenOutputs:
    """What a model says of the trained tokens of a micro-batch; tensors [M]."""

    trained: TrainedTokens
    values: Mapping[str, Tensor]

    def by_row(self, batch: TrainBatch, arriving: "Arriving | None" = None) -> dict[str, Tensor]:
        """The same as [B, T] on the CPU, where losses are computed; 0 where masked.

        Args:
            arriving: What `leaving` gave.
        """
        values = (arriving or self.leaving()).wait()
        return {name: self.trained.scatter(value, batch) for name, value in values.items()}

    def leaving(self) -> "Arriving":
        """Send the values to the CPU, and do not wait for them."""
        if not any(value.is_cuda for value in self.values.values()):
            return Arriving(self.values, None)
        found = {}
        for name, value in self.values.items():
            place = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            found[name] = place.copy_(value.detach(), non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Arriving(found, arrived)


@dataclass(frozen=True)
class Arriving:
    """Values on their way to the CPU, and when they are there: None if they are."""

    values: Mapping[str, Tensor]
    arrived: Any

    def wait(self) -> Mapping[str, Tensor]:
        """The values."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values


@dataclass(frozen=True)
class HeadChunk:
    """Rows of a micro-batch whose outputs are computed together, and their tokens' place in [M]."""

    rows: list[int]
    tokens: slice


class Backbone(nn.Module):
    """A model without its output layer, as one module: what is sharded as a whole.

    Args:
        model: The whole model; its parameters are this module's.
        decoder: The part of it that gives hidden states.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._decoder = [decoder]

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        plan: attention_plan.AttentionPlan,
        images: PackedImages | None = None,
    ) -> Tensor:
        """[N, D] last hidden states of a packed row."""
        given = {"input_ids": token_ids[None]}
        if images is not None:
            given = {"inputs_embeds": self._embeds(token_ids, images)[None]}
        elif self._has_lean_embedding():
            table = self.model.get_input_embeddings()
            embeds = _Embedding.apply(token_ids[None], table.weight, table.padding_idx)
            given = {"inputs_embeds": embeds}
        outputs = self._decoder[0](
            **given,
            position_ids=position_ids[None],
            use_cache=False,
            attention_plan=plan,
        )
        return outputs.last_hidden_state[0]

    def _has_lean_embedding(self) -> bool:
        embedding = self.model.get_input_embeddings()
        return (
            type(embedding) is nn.Embedding
            and embedding.weight.requires_grad
            and torch.is_grad_enabled()
            and gradient_of_master(embedding.weight) is not None
        )

    def _embeds(self, token_ids: Tensor, images: PackedImages) -> Tensor:
        """[N, D] embeddings of the tokens, those of images by what the model sees in them."""
        embeds = self.model.get_input_embeddings()(token_ids)
        features = image_features(self.model, images.pixels)
        if len(features) != images.num_pieces:
            raise ValueError(
                f"The images have {len(features)} tokens, but the prompts {images.num_pieces}: all "
                "images of a row must be in its first prompt."
            )
        place, piece = images.place.to(embeds.device), images.piece.to(embeds.device)
        found: Tensor = embeds.index_put((place,), features[piece].to(embeds.dtype))
        return found


class _Embedding(torch.autograd.Function):
    """Rows of a table, whose gradient adds to the master's: no dense one is made.

    As in PyTorch's own, the row of ``padding_idx`` gets none. What comes out is no view: compiled
    layers would tell one from the output of the layer before.
    """

    @staticmethod
    def forward(
        ctx: Any,  # autograd's context
        token_ids: Tensor,
        weight: Tensor,
        padding_idx: int | None,
    ) -> Tensor:
        ctx.save_for_backward(token_ids, weight)
        ctx.padding_idx = padding_idx
        return weight[token_ids]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        token_ids, weight = ctx.saved_tensors
        if ctx.padding_idx is not None:
            has_gradient = token_ids != ctx.padding_idx
            token_ids, grad = token_ids[has_gradient], grad[has_gradient]
        total = gradient_of_master(weight)
        assert total is not None, "the master was there in the forward pass"
        total.index_add_(0, token_ids.flatten(), grad.flatten(0, -2).float())
        return None, None, None


class PackedModel(ABC):
    """Runs a model over packed rows; what its output layer gives is a subclass's matter.

    Args:
        model: A model of transformers, on its device.
        decoder: The part of it that gives hidden states.
        shares_prefixes: Compute what rows of a group begin with alike once.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, shares_prefixes: bool = True
    ) -> None:
        attention.register()
        model.set_attn_implementation(attention_of_text(model.config, attention.IMPLEMENTATION))
        self.model = model
        self.shares_prefixes = shares_prefixes
        self.backbone = Backbone(model, decoder)
        self.routers: Routers | None = None
        """If there are any, tokens go to the experts that a batch tells."""
        self.ranks: Ranks | None = None
        self._gathering: Gathering | None = None

    def join(self, ranks: "Ranks", gathering: Gathering) -> None:
        """Work together with other ranks from now on, among which the model is spread."""
        self.ranks, self._gathering = ranks, gathering
        if ranks.sequence is not None:
            sequence_parallel.register()
            self.model.set_attn_implementation(sequence_parallel.IMPLEMENTATION)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device if self.ranks is None else torch.device(self.ranks.device)

    @property
    def trains_head(self) -> bool:
        """Whether this rank adds to the gradient of what comes after the last layer.

        Ranks that share rows all compute the same there; one of them counts.
        """
        return self.ranks is None or self.ranks.tells

    @property
    @abstractmethod
    def chunk_size(self) -> int:
        """Tokens whose outputs may be computed together."""

    @abstractmethod
    def outputs(
        self, hidden: Tensor, trained: TrainedTokens, batch: TrainBatch, entropy: bool
    ) -> TokenOutputs:
        """Outputs of trained tokens from their `hidden`, differentiable."""

    @property
    def coming_bytes(self) -> int:
        """Memory that a call takes for weights and gradients of other ranks."""
        return 0 if self._gathering is None else self._gathering.coming_bytes

    def pack(self, batch: TrainBatch) -> PackedRows:
        """The rows of ``batch`` as one.

        Raises:
            ValueError: A token is none of the model's.
        """
        batch.require_tokens_below(self.model.config.get_text_config().vocab_size)
        packed = pack_rows(batch, self.shares_prefixes)
        if PIXELS in batch:
            packed.images = pack_images(batch, packed.segments, self.model.config.image_token_id)
        if self.routers is not None and ROUTES in batch:
            packed.routes = pack_routes(batch, packed.segments)
        return packed

    def goes_back(self, has_gradient: bool, is_last: bool) -> bool:
        """Whether a backward pass is due, which all ranks then do together.

        Args:
            has_gradient: There is some on this rank.
            is_last: No later micro-batch is sure to have a backward pass.
        """
        if self.ranks is None or self._gathering is None:
            return has_gradient
        return self.ranks.any(has_gradient) or (is_last and self._gathering.is_due)

    def before_backward(self, is_last: bool) -> None:
        """Get ready for a backward pass that all ranks do together; ``is_last`` as above."""
        if self._gathering is not None:
            self._gathering.before_backward(is_last)

    def rest(self) -> None:
        """Free what a sharded model has put together."""
        if self._gathering is not None:
            self._gathering.rest()

    def hidden(self, packed: PackedRows) -> Tensor:
        """[M, D] output of the last layer where trained tokens are predicted."""
        device = self.device
        plan = attention_plan.AttentionPlan(packed, device)
        token_ids, position_ids = sent(packed.token_ids, device), sent(packed.position_ids, device)
        source = sent(packed.source, device)
        sequence = self.ranks.sequence if self.ranks is not None else None
        self._follow(packed.routes, sequence)
        if packed.images is not None:
            if sequence is not None:
                raise ValueError("Rows with images can't be cut over ranks: set sp_size to 1.")
            hidden_ND = self.backbone(token_ids, position_ids, plan, packed.images)
            return hidden_ND.index_select(0, source)
        run = self.backbone if sequence is None else partial(sequence.hidden, self.backbone)
        hidden_ND = run(token_ids, position_ids, plan)
        return hidden_ND.index_select(0, source)

    def _follow(self, routes: Tensor | None, sequence: "SequenceGroup | None") -> None:
        """Have the pass to come, and its backward pass, take these routes."""
        if self.routers is not None:
            own = routes if routes is None or sequence is None else sequence.part(routes)
            self.routers.follow(None if own is None else own.to(self.device))

    def token_outputs(self, batch: TrainBatch, entropy: bool = False) -> TokenOutputs:
        """Outputs of every trained token, differentiable."""
        packed = self.pack(batch)
        return self.outputs(self.hidden(packed), packed.trained, batch, entropy)

    def chunks(self, batch: TrainBatch) -> Iterator[HeadChunk]:
        """The rows of a batch in order, so many at a time as have `chunk_size` trained tokens."""
        count_B = batch["action_mask"].sum(dim=1).tolist()
        rows: list[int] = []
        start = num_tokens = 0
        for unit in batch.units():
            added = sum(count_B[row] for row in unit)
            if rows and num_tokens + added > self.chunk_size:
                yield HeadChunk(rows, slice(start, start + num_tokens))
                rows, start, num_tokens = [], start + num_tokens, 0
            rows = rows + unit
            num_tokens += added
        yield HeadChunk(rows, slice(start, start + num_tokens))


def check_width(model: PreTrainedModel, weight: torch.Tensor) -> None:
    """Refuse an output layer that does not fit the model's hidden size."""
    if weight.shape[-1] != model.config.get_text_config().hidden_size:
        raise ValueError(
            f"{type(model).__name__} has an output layer of width {weight.shape[-1]}, but hidden "
            f"states of width {model.config.get_text_config().hidden_size}: unsupported."
        )
