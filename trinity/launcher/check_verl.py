"""What `trainer_type: verl` can't do, or can't do on this machine."""

from collections.abc import Iterator, Mapping

from trinity.common.constants import TrainerStrategy
from trinity.common.errors import Problem
from trinity.launcher.build_train_engine import reads
from trinity.launcher.check_megatron import megatron_problems
from trinity.launcher.plan import RunPlan
from trinity.trainer.backends.verl.compat import (
    can_pack,
    flash_attn_fault,
    unusable_trl,
)


def verl_problems(plan: RunPlan, shape: Mapping[str, object]) -> Iterator[Problem]:
    """All that would stop veRL's engines at once. That packages are there is checked elsewhere.

    Args:
        shape: The model's config.json; empty if it is not known.
    """
    is_megatron = plan.config.trainer.trainer_strategy is TrainerStrategy.MEGATRON
    if is_megatron:
        yield from megatron_problems(plan, shape)
    if plan.config.model.lora_configs:
        message = "Adapters are trained by the built-in trainer only."
        yield Problem("model.lora_configs", message, "Set `trainer_type: torch`.")
    if reads(plan.config, "necs"):
        message = "clipv reads a sum over the vocabulary that veRL's engines do not give."
        fix = "Set it to `clipb`, or use `trainer_type: torch`."
        yield Problem("algorithm.advantage_fn", message, fix, "clipv")
    if not is_megatron:
        yield from _unusable_packages(plan)
    yield from _unshared_sequences(plan)


def _unusable_packages(plan: RunPlan) -> Iterator[Problem]:
    """Packages of this environment that veRL's FSDP engines can't be imported with."""
    if (trl := unusable_trl()) is not None:
        message = f"TRL {trl} is installed, and veRL's FSDP engines can't be imported beside it."
        fix = "Run pip uninstall trl in this environment."
        yield Problem("trainer.trainer_type", message, fix, "verl")
    packs = plan.config.trainer.use_remove_padding
    fault = flash_attn_fault(plan.device) if packs else None
    if fault is not None:
        message = f"flash-attn is installed and can't be loaded: {fault}."
        fix = (
            "Run pip install flash-attn==2.8.1 (with -v --no-build-isolation if that fails), or "
            "set it to false."
        )
        yield Problem("trainer.use_remove_padding", message, fix, True)


def _unshared_sequences(plan: RunPlan) -> Iterator[Problem]:
    trainer = plan.config.trainer
    size = trainer.ulysses_sequence_parallel_size
    if size > 1 and not (trainer.use_remove_padding and can_pack(plan.device)):
        message = (
            "veRL shares a sequence between ranks only where sequences are packed, which needs "
            "GPUs, the package flash-attn and `use_remove_padding: true`."
        )
        fix = "Set it to 1, or use `trainer_type: torch`."
        yield Problem("trainer.ulysses_sequence_parallel_size", message, fix, size)
