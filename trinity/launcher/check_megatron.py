"""What `trainer_strategy: megatron` can't do, or can't do with this model on these GPUs."""

from collections.abc import Iterator, Mapping, Sequence

from trinity.common.constants import EXPERT_COUNTS, OnSaveError, SaveStrategy
from trinity.common.errors import Problem
from trinity.launcher.plan import RunPlan, rope_overrides
from trinity.trainer.backends.verl.compat import missing_for_megatron

_SIZES = "trainer.megatron"
_USE_FSDP = "Set `trainer_strategy: fsdp2`."


def megatron_problems(plan: RunPlan, shape: Mapping[str, object]) -> Iterator[Problem]:
    """All that would stop veRL's Megatron engine.

    Args:
        shape: The model's config.json; empty if it is not known.
    """
    yield from _cannot_start(plan)
    yield from _other_settings(plan)
    yield from _unpacked(plan)
    yield from _uneven(plan, shape)
    yield from _useless(plan, shape)
    yield from _experts(plan, shape)


def _cannot_start(plan: RunPlan) -> Iterator[Problem]:
    key = "trainer.trainer_strategy"
    if (missing := missing_for_megatron()) is not None:
        message = f"The package {missing!r} is not installed."
        fix = (
            "Install it with pip install 'trinity-rft[megatron]', on Python 3.12. Or: " + _USE_FSDP
        )
        yield Problem(key, message, fix, "megatron")
    if plan.device == "cpu":
        yield Problem(key, "Megatron computes on GPUs only.", _USE_FSDP, "megatron")


def _other_settings(plan: RunPlan) -> Iterator[Problem]:
    """Settings of the trainer and of the model that this engine does not follow."""
    trainer = plan.config.trainer
    if trainer.dtype != "bfloat16":
        message = f"veRL's Megatron engine computes in bfloat16, not {trainer.dtype}."
        fix = f"Set `dtype: bfloat16`. Or: {_USE_FSDP}"
        yield Problem("trainer.dtype", message, fix, trainer.dtype)
    if trainer.save_strategy is not SaveStrategy.UNRESTRICTED:
        message = "Megatron's ranks write a checkpoint together, not one after another."
        yield Problem("trainer.save_strategy", message, "Remove it.", trainer.save_strategy.value)
    if trainer.on_save_error is OnSaveError.CONTINUE:
        message = "Megatron's ranks write a checkpoint together: if one fails, none can go on."
        yield Problem("trainer.on_save_error", message, "Set it to `stop`.", "continue")
    if trainer.offload_policy:
        message = "This is a setting of FSDP2."
        fix = "Set `param_offload: true` and `optimizer_offload: true` in its place."
        yield Problem("trainer.offload_policy", message, fix, True)
    if trainer.grad_offload and not trainer.param_offload:
        message = "Megatron frees gradients together with the parameters."
        yield Problem("trainer.grad_offload", message, "Set `param_offload: true` too.", True)
    for name in rope_overrides(plan.config.model):
        message = "veRL's Megatron engine reads the model's own config.json."
        yield Problem(f"model.{name}", message, "Write it into the model's config.json.")


def _unpacked(plan: RunPlan) -> Iterator[Problem]:
    trainer = plan.config.trainer
    shares = trainer.megatron.context_parallel_size
    if shares > 1 and not trainer.use_remove_padding:
        message = f"{shares} GPUs share each sequence, which veRL does for packed sequences only."
        fix = "Remove it, or set `megatron.context_parallel_size: 1`."
        yield Problem("trainer.use_remove_padding", message, fix, False)


def _uneven(plan: RunPlan, shape: Mapping[str, object]) -> Iterator[Problem]:
    sizes = plan.config.trainer.megatron
    heads = _count(shape, "num_attention_heads")
    keys = _count(shape, "num_key_value_heads") or heads
    tensor = sizes.tensor_model_parallel_size
    if heads % tensor or keys % tensor:
        message = (
            f"{tensor} GPUs share each matrix, but can't share the model's {heads} attention heads "
            f"and {keys} key heads evenly."
        )
        fix = f"Set it to {_one_of(_divisors(tensor, heads, keys))}."
        yield Problem(f"{_SIZES}.tensor_model_parallel_size", message, fix, tensor)
    rows = _count(shape, "vocab_size")
    if rows % tensor:
        message = f"{tensor} GPUs can't share the {rows} rows of the vocabulary evenly."
        fix = f"Set it to {_one_of(_divisors(tensor, rows))}."
        yield Problem(f"{_SIZES}.tensor_model_parallel_size", message, fix, tensor)
    layers = _count(shape, "num_hidden_layers")
    stages = sizes.pipeline_model_parallel_size
    chunks = stages * (sizes.virtual_pipeline_model_parallel_size or 1)
    if layers % chunks:
        message = f"The model's {layers} layers can't be cut into {chunks} chunks of one length."
        fix = f"Make stages times chunks of a stage {_one_of(_divisors(chunks, layers))}."
        yield Problem(f"{_SIZES}.pipeline_model_parallel_size", message, fix, stages)


def _useless(plan: RunPlan, shape: Mapping[str, object]) -> Iterator[Problem]:
    """Sizes of what is not there, which Megatron refuses once it has started."""
    sizes = plan.config.trainer.megatron
    chunks, experts = sizes.virtual_pipeline_model_parallel_size, sizes.expert_model_parallel_size
    if chunks is not None and sizes.pipeline_model_parallel_size == 1:
        message = "Chunks of a stage need several stages, and there is one."
        fix = "Remove it, or set `pipeline_model_parallel_size`."
        yield Problem(f"{_SIZES}.virtual_pipeline_model_parallel_size", message, fix, chunks)
    if (chunks or 1) > 1 and shape.get("tie_word_embeddings"):
        message = (
            "megatron-bridge can't load several chunks of a stage of a model whose output layer is "
            "its embedding (tie_word_embeddings)."
        )
        yield Problem(
            f"{_SIZES}.virtual_pipeline_model_parallel_size", message, "Remove it.", chunks
        )
    given = {
        "expert_model_parallel_size": experts if experts > 1 else None,
        "expert_tensor_parallel_size": sizes.expert_tensor_parallel_size,
    }
    for name, value in given.items():
        if shape and value is not None and not _num_experts(shape):
            message = "The model has no experts to share."
            yield Problem(f"{_SIZES}.{name}", message, "Remove it.", value)


def _experts(plan: RunPlan, shape: Mapping[str, object]) -> Iterator[Problem]:
    """Experts are spread in a way of their own, over the GPUs of several copies if need be."""
    sizes, experts = plan.config.trainer.megatron, _num_experts(shape)
    if not experts:
        return
    shares, tensor = sizes.expert_model_parallel_size, sizes.tensor_model_parallel_size
    cuts, stages = sizes.expert_tensor_parallel_size or tensor, sizes.pipeline_model_parallel_size
    key = f"{_SIZES}.expert_model_parallel_size"
    if experts % shares:
        message = f"{shares} GPUs can't share the model's {experts} experts evenly."
        yield Problem(key, message, f"Set it to {_one_of(_divisors(shares, experts))}.", shares)
    width = _count(shape, "moe_intermediate_size") or _count(shape, "intermediate_size")
    if width % cuts:
        message = f"{cuts} GPUs can't share the {width} columns of an expert evenly."
        fix = f"Set it to {_one_of(_divisors(cuts, width))}."
        yield Problem(f"{_SIZES}.expert_tensor_parallel_size", message, fix, cuts)
    gpus = plan.num_ranks
    if plan.gpus.total and gpus % (shares * cuts * stages):
        message = (
            f"The experts take {shares} x {cuts} x {stages} GPUs (expert parallel, expert tensor "
            f"parallel, stages), of which the trainer's {gpus} are no multiple."
        )
        fit = [n for n in _divisors(gpus + 1, experts) if gpus % (n * cuts * stages) == 0]
        fix = f"Set it to {_one_of(fit)}." if fit else "Set `expert_tensor_parallel_size: 1`."
        yield Problem(key, message, fix, shares)
    if tensor > 1 and not sizes.sequence_parallel:
        message = f"Megatron trains experts on {tensor} tensor parallel GPUs with it only."
        yield Problem(f"{_SIZES}.sequence_parallel", message, "Remove it.", False)


def _num_experts(shape: Mapping[str, object]) -> int:
    return max(_count(shape, name) for name in EXPERT_COUNTS)


def _divisors(below: int, *counts: int) -> list[int]:
    """Numbers under ``below`` by which all counts can be divided."""
    return [n for n in range(1, below) if not any(count % n for count in counts)]


def _one_of(numbers: Sequence[int]) -> str:
    return ("one of " if len(numbers) > 1 else "") + ", ".join(map(str, numbers))


def _count(shape: Mapping[str, object], name: str) -> int:
    return int(str(shape.get(name) or 0))
