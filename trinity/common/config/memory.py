"""Estimated memory of one GPU, part by part, in bytes.

Counted for a dense Llama-like model on the torch backend: bf16 weights with float32 masters and
Adam, packed sequences, attention that keeps no score matrix, logits in chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinity.common.config.derive import needs_critic, needs_reference
from trinity.common.config.gpus import GPUSplit
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.memory_megatron import megatron_memory
from trinity.common.config.memory_parts import CONTEXT, Part, batch_tokens, micro_batch_tokens
from trinity.common.config.root import Config
from trinity.common.config.shape import ModelShape
from trinity.common.config.training import PartSettings, training_settings
from trinity.common.constants import EngineType, SyncMethod, TrainerStrategy, TrainerType
from trinity.utils.processor import has_own_products

_CPU_LOGITS = 26_000_000  # at a time
_GPU_LOGITS = 2**31  # at a time, in two chunks
_CPU_LIBRARIES = 400 * 2**20
_SENT_AT_A_TIME = 2**28
_CPU_SLACK = 0.1  # measured on three shapes, from 19 to 135 million weights: 5 % off at most
_ADAM_BYTES = 8
_MASTER_BYTES = 4
_SPLIT_MASTER_BYTES = 2  # of bfloat16 weights on a CPU: what these lack of their masters
GRADIENT_BYTES = 4
_FIRST_GRADIENT_BYTES = 2  # as a pass gives it, in bfloat16
_LITTLE = 0.1  # of a GPU's memory


def is_little(size: float, gpu_bytes: float) -> bool:
    """Whether so many bytes of a GPU may be taken to make training faster, unasked."""
    return size <= _LITTLE * gpu_bytes


@dataclass(frozen=True)
class Passing:
    """A pass with gradients: its tokens, and what a layer, all layers and the output layer take."""

    tokens: int
    layer: float
    activations: Part
    logits: Part

    @property
    def whole(self) -> float:
        return self.activations.bytes + self.logits.bytes


def trainer_memory(
    config: Config, shape: ModelShape, shards: int, gpu_bytes: float = 0
) -> list[Part]:
    """Parts of the memory of one training GPU. ``config`` must be filled in.

    Args:
        shards: GPUs the weights and optimizer state are split over.
        gpu_bytes: Memory of each: several put small models together once a step.
    """
    settings = training_settings(config)
    if config.trainer.trainer_strategy is TrainerStrategy.MEGATRON:
        return megatron_memory(config, shape, shards)
    width = 2 if config.trainer.dtype == "bfloat16" else 4
    parts = _model_state("actor", config, shape, settings.actor, width, shards)
    if needs_critic(config):
        parts += _model_state("critic", config, shape, settings.critic, width, shards)
    if needs_reference(config) and not config.model.lora_configs:
        away = settings.reference.param_offload
        amount = 0 if away else shape.parameters * width / shards
        how = "in CPU memory" if away else f"{width} bytes / {shards}"
        parts.append(Part("reference weights", amount, how))
    gathers_once = shards > 1 and _gathers_once(config, shape, settings.actor, width, gpu_bytes)
    if gathers_once:
        parts.append(Part("gathered layers", shape.parameters * width, "all, whole in a step"))
    elif shards > 1:
        layer = (shape.parameters - shape.vocabulary * shape.hidden) / shape.layers
        gathered = (2 * layer + shape.vocabulary * shape.hidden) * width
        parts.append(Part("gathered layers", gathered, "two layers and the embedding, whole"))
    if config.synchronizer.delta and config.mode.pairs:
        how = f"{width} bytes, to tell what changes (synchronizer.delta)"
        parts.append(Part("weights of the version before", shape.parameters * width, how))
    tokens = micro_batch_tokens(config, settings.actor)
    layer = _layer_bytes(config, shape, width, shards)
    passing = Passing(
        *(tokens, tokens * layer),
        _activations(shape, settings.actor, width, tokens, layer),
        _logits(config, shape, tokens, width),
    )
    if config.cluster.gpu_per_node:
        gradients = _gpu_gradients(config, shape, settings.actor, shards, passing, gathers_once)
        context = Part("CUDA and libraries", CONTEXT, "about")
        return [*parts, gradients, passing.activations, passing.logits, context]
    parts += [passing.activations, passing.logits]
    slack = _CPU_SLACK * passing.whole
    parts.append(Part("buffers", slack, f"of passes: {_CPU_SLACK:.0%} of the last two"))
    parts += _weights_sent(config, shape, width)
    return [*parts, Part("Python and libraries", _CPU_LIBRARIES, "about")]


def _weights_sent(config: Config, shape: ModelShape, width: int) -> list[Part]:
    """Shared memory in which engines find weights: of one version while the next is put there."""
    if not config.mode.pairs or config.synchronizer.sync_method is not SyncMethod.MEMORY:
        return []
    weights = lora_parameters(config, shape) if config.model.lora_configs else shape.parameters
    size = 2 * weights * width + min(weights * width, _SENT_AT_A_TIME)
    return [Part("weights sent", size, "shared memory, two versions; a part of one on its way")]


def _model_state(
    name: str,
    config: Config,
    shape: ModelShape,
    settings: PartSettings,
    width: int,
    shards: int,
) -> list[Part]:
    weights = shape.parameters
    trained = lora_parameters(config, shape) if config.model.lora_configs else weights
    away = "in CPU memory"
    kept = 0 if settings.param_offload else weights * width / shards
    how = away if settings.param_offload else f"{width} bytes / {shards}"
    parts = [Part(f"{name} weights", kept, how)]
    master = _MASTER_BYTES if width < _MASTER_BYTES or config.model.lora_configs else 0
    if width < _MASTER_BYTES and not config.cluster.gpu_per_node and shards == 1:
        master = _SPLIT_MASTER_BYTES
    if not config.cluster.gpu_per_node:
        grad = trained * GRADIENT_BYTES / shards
        parts.append(Part(f"{name} gradients", grad, f"4 bytes / {shards}"))
    state = 0 if settings.optimizer_offload else trained * (master + _ADAM_BYTES) / shards
    how = away if settings.optimizer_offload else f"{master + _ADAM_BYTES} bytes / {shards}"
    return [*parts, Part(f"{name} optimizer", state, how)]


def _gathers_once(
    config: Config, shape: ModelShape, actor: PartSettings, width: int, gpu_bytes: float
) -> bool:
    """Whether ranks put weights together and add gradients up once a step."""
    is_ours = config.trainer.trainer_type is TrainerType.TORCH
    if not is_ours or actor.param_offload or not config.cluster.gpu_per_node:
        return False
    trained = lora_parameters(config, shape) if config.model.lora_configs else shape.parameters
    return is_little(shape.parameters * width + trained * GRADIENT_BYTES, gpu_bytes)


def _gpu_gradients(
    config: Config,
    shape: ModelShape,
    actor: PartSettings,
    shards: int,
    passing: Passing,
    gathers_once: bool,
) -> Part:
    """Gradients on a GPU beside what one pass takes: one model is trained at a time.

    With several passes a step those of the first are there in the others. With one they come as
    its activations go, layer by layer, but for those of the tables at both ends, which are there
    from the start; in the end all are there, and one layer's activations.
    """
    has_adapter = bool(config.model.lora_configs)
    trained = lora_parameters(config, shape) if has_adapter else shape.parameters
    whole = trained * GRADIENT_BYTES / shards
    table = shape.vocabulary * shape.hidden * GRADIENT_BYTES
    if shards == 1 and not has_adapter and actor.optimizer_offload:
        return Part("gradients", table, "of the output layer; the others go to CPU memory")
    has_one_pass = passing.tokens == batch_tokens(config)
    if gathers_once:
        amount = whole + _whole_gradients(trained, has_one_pass, passing)
        return Part("gradients", amount, f"whole until added up, and 4 bytes / {shards}")
    if shards > 1 or has_adapter or not has_one_pass:
        return Part("gradients", whole, f"4 bytes / {shards}")
    early = table if shape.is_tied else 2 * table
    late = whole + passing.layer - passing.whole
    return Part("gradients", max(early, late), "those that are there beside the activations")


def _whole_gradients(trained: int, has_one_pass: bool, passing: Passing) -> float:
    """Bytes, beside a pass, of gradients that ranks add up once a step.

    Those of earlier passes are there all the time. What is sent is a copy of all, once the
    activations are gone.
    """
    if has_one_pass:
        return max(0, trained * (GRADIENT_BYTES + _FIRST_GRADIENT_BYTES) - passing.whole)
    sums = trained * GRADIENT_BYTES
    return max(sums, 2 * sums - passing.whole)


def lora_parameters(config: Config, shape: ModelShape) -> int:
    """Weights of the adapter on all linear layers."""
    ends = 2 * (shape.hidden + shape.query) + 2 * (shape.hidden + shape.kv)
    ends += 3 * (shape.hidden + shape.mlp)
    rank = sum(lora.lora_rank for lora in config.model.lora_configs or [])
    return shape.layers * rank * ends


def _logits(config: Config, shape: ModelShape, tokens: int, width: int) -> Part:
    if not config.cluster.gpu_per_node:
        most = min(tokens, max(_CPU_LOGITS // shape.vocabulary, 1))
        return Part("logits in chunks", most * shape.vocabulary * width, f"of {most:,} tokens")
    most = min(tokens, max(_GPU_LOGITS // shape.vocabulary, 1))
    gradient = shape.vocabulary * shape.hidden * width
    how = f"of {most:,} tokens, and the gradient of their weight"
    return Part("logits in chunks", most * shape.vocabulary * width + gradient, how)


def is_compiled(config: Config) -> bool:
    """Whether our trainer compiles layers, which keeps less of them for the backward pass."""
    trainer = config.trainer
    if trainer.trainer_type is not TrainerType.TORCH or not config.cluster.gpu_per_node:
        return False
    if config.algorithm.enable_router_replay:
        return False
    if trainer.use_torch_compile is not None:
        return trainer.use_torch_compile
    # where it is known to pay
    return trainer.ulysses_sequence_parallel_size == 1 and not config.model.lora_configs


def _activations(
    shape: ModelShape, settings: PartSettings, width: int, tokens: int, layer: int
) -> Part:
    """What a pass of ``tokens`` keeps, if a layer keeps ``layer`` bytes of each."""
    if settings.gradient_checkpointing:
        kept = shape.layers * shape.hidden * width + layer
        how = f"{tokens:,} tokens, one layer at a time"
    else:
        kept = shape.layers * layer
        how = f"{tokens:,} tokens, {shape.layers} layers"
    return Part("activations", tokens * (kept + 2 * shape.hidden * width), how)


def _layer_bytes(config: Config, shape: ModelShape, width: int, shards: int) -> int:
    """What one layer keeps of one token for the backward pass."""
    if config.cluster.gpu_per_node:
        return layer_activation_bytes(shape, width, is_compiled(config))
    is_whole = shards == 1 and not config.model.lora_configs
    if width == 2 and is_whole and shape.is_joinable and has_own_products():
        return joined_layer_bytes(shape)
    return lean_layer_bytes(shape, width)


def layer_activation_bytes(shape: ModelShape, width: int, compiled: bool = False) -> int:
    """Bytes that one layer keeps of one token for the backward pass.

    Two norms (the input in float32 and the output), queries, keys, values and the attention's
    output before and after rotation, and the four tensors of a gated MLP. A compiled layer computes
    what is cheap again: it keeps inputs and outputs of the norms, of attention and of the matrices.
    Models that normalise queries and keys keep these from before that too.
    """
    normed = shape.query + shape.kv if shape.norms_heads else 0
    if compiled:
        kept = 4 * shape.hidden + 2 * shape.query + 2 * shape.kv + normed + 3 * shape.mlp
        return width * kept
    norms = (4 + 2 * width) * (2 * shape.hidden + normed)
    attention = width * (2 * shape.query + 3 * shape.kv)
    return norms + attention + 4 * width * shape.mlp


def lean_layer_bytes(shape: ModelShape, width: int) -> int:
    """The same for a layer on a CPU, whose norms and MLP have a backward pass of their own.

    What goes into the norms and comes out of them, queries, keys, values, the attention's output,
    and both inner tensors of the MLP. Where heads are normalised, what goes into that too.
    """
    normed = shape.query + shape.kv if shape.norms_heads else 0
    return width * (2 * (2 * shape.hidden + shape.query + shape.kv + shape.mlp) + normed)


def joined_layer_bytes(shape: ModelShape) -> int:
    """The same in bfloat16 where forward and backward pass of a layer are one compiled call each.

    What norms give is computed again, but for heads.
    """
    normed = shape.query + shape.kv if shape.norms_heads else 0
    return 2 * (2 * (shape.hidden + shape.query + shape.kv + shape.mlp) + normed)


def engine_memory(
    model: InferenceModelConfig, shape: ModelShape, gpu_bytes: float, slots: int = 1
) -> list[Part]:
    """Parts of the memory of one GPU of an engine.

    vLLM's cache gets what the weights leave of its share; the embedded engine's is as large as
    ``slots`` workflows with whole sequences make it.
    """
    width = 4 if model.dtype == "float32" else 2
    shards = max(model.tensor_parallel_size * model.pipeline_parallel_size, 1)
    weights = shape.parameters * width / shards
    per_token = 2 * shape.layers * shape.kv * width / shards
    longest = model.max_model_len or 1
    parts = [Part("weights", weights, f"{width} bytes a weight / {shards}")]
    if model.engine_type is EngineType.TORCH:
        cache = slots * longest * per_token
        return [*parts, Part("KV cache", cache, f"{slots} workflows of {longest:,} tokens")]
    cache = max(gpu_bytes * model.gpu_memory_utilization - weights - CONTEXT, 0)
    tokens = cache / per_token
    held = f"{tokens:,.0f} tokens, {tokens / longest:,.0f} whole rows"
    return [*parts, Part("KV cache", cache, held), Part("CUDA and libraries", CONTEXT, "about")]


def checkpoint_bytes(config: Config, shape: ModelShape) -> tuple[float, float]:
    """Size of one checkpoint's training state, and of its Hugging Face files."""
    if config.model.lora_configs:
        adapter = lora_parameters(config, shape)
        return adapter * (_MASTER_BYTES + _ADAM_BYTES), adapter * 2
    models = 2 if needs_critic(config) else 1
    state = models * shape.parameters * (_MASTER_BYTES + _ADAM_BYTES)
    return state, shape.parameters * 2


def shards_of(split: GPUSplit) -> int:
    """GPUs the trainer's state is split over; 1 on a machine without."""
    return max(split.trainer, 1)
