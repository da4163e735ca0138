"""What a training GPU holds with `trainer_strategy: megatron`, in bfloat16."""

from __future__ import annotations

from trinity.common.config.derive import needs_critic, needs_reference
from trinity.common.config.memory_parts import CONTEXT, Part, micro_batch_tokens
from trinity.common.config.root import Config
from trinity.common.config.shape import ModelShape
from trinity.common.config.training import PartSettings, training_settings

_WIDTH = 2
_GRADIENT = 4  # there as long as the model is
_OPTIMIZER = 12  # a master and two moments
_LOGIT = 10  # itself, its share of the softmax and its gradient in float32
_ENTROPY = 6  # a copy, and a softmax of its own


def megatron_memory(config: Config, shape: ModelShape, gpus: int) -> list[Part]:
    """Parts of the memory of one GPU of ``gpus``.

    Matrices are cut over tensor parallel GPUs and layers over stages; the optimizer over all. A
    stage holds activations of as many micro-batches as there are stages.
    """
    settings = training_settings(config)
    sizes = config.trainer.megatron
    cuts = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
    parts = _state("actor", shape, settings.actor, cuts, gpus)
    if needs_critic(config):
        parts += _state("critic", shape, settings.critic, cuts, gpus)
    if needs_reference(config):
        away = settings.reference.param_offload
        amount = 0 if away else shape.parameters * _WIDTH / cuts
        how = "in CPU memory" if away else f"{_WIDTH} bytes / {cuts}"
        parts.append(Part("reference weights", amount, how))
    tokens, tensor = micro_batch_tokens(config, settings.actor), sizes.tensor_model_parallel_size
    layer = _layer_bytes(shape) / tensor
    kept = shape.layers * layer
    if settings.actor.gradient_checkpointing:
        kept = shape.layers * shape.hidden * _WIDTH / tensor + layer
    how = f"{tokens:,} tokens, {shape.layers} layers / {tensor}"
    parts.append(Part("activations", tokens * kept, how))
    each = _LOGIT + (_ENTROPY if config.algorithm.entropy_loss_fn not in (None, "none") else 0)
    how = f"of {tokens:,} tokens at once, {each} bytes / {tensor}"
    parts.append(Part("logits", tokens * shape.vocabulary * each / tensor, how))
    return [*parts, Part("CUDA and libraries", CONTEXT, "about")]


def _state(
    name: str, shape: ModelShape, settings: PartSettings, cuts: int, gpus: int
) -> list[Part]:
    held = 0 if settings.param_offload else shape.parameters / cuts
    steps = 0 if settings.optimizer_offload else shape.parameters / gpus
    return [
        Part(f"{name} weights", held * _WIDTH, f"{_WIDTH} bytes / {cuts}"),
        Part(f"{name} gradients", held * _GRADIENT, f"{_GRADIENT} bytes / {cuts}"),
        Part(f"{name} optimizer", steps * _OPTIMIZER, f"{_OPTIMIZER} bytes / {gpus}"),
    ]


def _layer_bytes(shape: ModelShape) -> int:
    """What a layer keeps of a token: in and out of norms, of attention and of the MLP's middle."""
    attention = 3 * shape.query + 3 * shape.kv
    return _WIDTH * (4 * shape.hidden + attention + 3 * shape.mlp)
