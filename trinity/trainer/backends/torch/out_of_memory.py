"""What a trainer says when its GPU has no memory left: the setting to lower, and by how much."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from trinity.common.config.memory import layer_activation_bytes
from trinity.common.config.shape import ModelShape, find_shape
from trinity.common.errors import TrinityError
from trinity.trainer.backends.torch.settings import TorchEngineSettings

_TOKENS = "trainer.max_token_len_per_gpu"
_GIB = 2**30
_STEP = 256  # tokens that an advice is rounded down to
_LOGITS = 2**30  # of the output layer at a time
_SPARE = 0.92  # of the room; the rest is lost between blocks of memory


class GPUOutOfMemoryError(TrinityError):
    """A GPU has no memory left for what the settings ask of it."""


@contextmanager
def naming_the_setting(
    settings: TorchEngineSettings, phase: str, coming_bytes: Callable[[], int] | None = None
) -> Iterator[None]:
    """Within, running out of GPU memory is a `GPUOutOfMemoryError`.

    Args:
        phase: What is done, for the message: "training pass of the actor".
        coming_bytes: What gradients and optimizer will take that are not there yet; given where
            the tokens of a micro-batch decide how much memory is needed.
    """
    if settings.device == "cpu":
        yield
        return
    before = torch.cuda.memory_allocated()
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if coming_bytes is None:
            advice = _less_kept(settings)
        else:
            own = min(total - others, total * torch.cuda.get_per_process_memory_fraction())
            advice = _fewer_tokens(settings, own - before - coming_bytes())
        held = f"{before / _GIB:.1f} GiB of its {total / _GIB:.1f} were in use before"
        outside = f", {others / _GIB:.1f} by other programs and the driver" if others > _GIB else ""
        raise GPUOutOfMemoryError(
            f"Out of GPU memory in the {phase}: {held}{outside}. {advice}"
        ) from error


def _fewer_tokens(settings: TorchEngineSettings, room: float) -> str:
    """Advice where the tokens of a pass decide; ``room`` is what they may take, in bytes."""
    asked = settings.micro_batches.max_tokens
    shape = find_shape(settings.model_path)
    fitting = 0 if shape is None else _tokens_in(room, shape, settings)
    if fitting >= _STEP and (asked is None or fitting < asked):
        was = "" if asked is None else f" from {asked}"
        return f"Lower {_TOKENS}{was} to {fitting}.{_other_ways(settings)}"
    if asked is not None and asked >= 2 * _STEP and fitting >= _STEP:
        return f"Lower {_TOKENS} from {asked} to {asked // 2}.{_other_ways(settings)}"
    return _less_kept(settings)


def _tokens_in(room: float, shape: ModelShape, settings: TorchEngineSettings) -> int:
    """Tokens whose activations fit into ``room`` bytes, as `trinity explain` counts them."""
    width = 2 if settings.dtype == "bfloat16" else 4
    layer = layer_activation_bytes(shape, width, settings.compiles_layers)
    kept = shape.layers * layer
    if settings.gradient_checkpointing:
        kept = shape.layers * shape.hidden * width + layer
    head = _LOGITS * width + shape.vocabulary * shape.hidden * width
    tokens = (_SPARE * room - head) / (kept + 2 * shape.hidden * width)
    return max(int(tokens), 0) // _STEP * _STEP


def _other_ways(settings: TorchEngineSettings) -> str:
    if settings.gradient_checkpointing:
        return ""
    return (
        " Or set trainer.enable_gradient_checkpointing: true, which takes about a third more time."
    )


def _less_kept(settings: TorchEngineSettings) -> str:
    """Advice where what is kept between steps is too much."""
    shape = find_shape(settings.model_path)
    ways = []
    if not settings.optimizer_offload:
        amount = "" if shape is None else f", which frees {12 * shape.parameters / _GIB:.1f} GiB"
        ways.append(f"trainer.optimizer_offload: true{amount}")
    if not settings.gradient_checkpointing:
        ways.append("trainer.enable_gradient_checkpointing: true")
    ways.append("more GPUs (cluster.gpu_per_node), over which weights and optimizer are spread")
    return f"Set {', or '.join(ways)}. `trinity explain` shows what takes how much."
