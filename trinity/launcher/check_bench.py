"""Which checkpoints `mode: bench` evaluates, and those whose weights it could not read."""

import json
from collections.abc import Iterator
from pathlib import Path

from trinity.checkpoint import layout
from trinity.checkpoint.huggingface import has_weights
from trinity.common.constants import Mode
from trinity.common.errors import Problem
from trinity.launcher.plan import RunPlan


def bench_problems(plan: RunPlan) -> Iterator[Problem]:
    """A job of broken checkpoints alone, and those that nothing but Megatron can read."""
    if plan.config.mode is not Mode.BENCH:
        return
    from trinity.checkpoint.megatron import MODEL_TYPES

    folders = folders_of(plan)
    broken = broken_of(plan)
    if broken and not folders:
        name, why = list(broken.items())[-1]
        message = f"No checkpoint in {plan.job.path} is whole ({name}: {why})."
        yield Problem("mode", message, "Restore one, or delete them.", "bench")
    for folder in folders:
        actor = folder / layout.ACTOR
        if has_weights(actor / layout.HUGGING_FACE) or not layout.dist_checkpoint(actor).is_dir():
            continue
        kind = config_of(actor).get("model_type")
        if kind not in MODEL_TYPES:
            message = (
                f"{folder.name} holds Megatron's files alone, which can be read here of models of "
                f"the types {', '.join(MODEL_TYPES)}, and this is {kind or 'of no known type'}."
            )
            fix = (
                "Save with `trainer.save_hf_checkpoint: always`, or give the checkpoint a folder "
                "actor/huggingface with weights."
            )
            yield Problem("mode", message, fix, "bench")


def folders_of(plan: RunPlan) -> list[Path]:
    """The checkpoints to evaluate: all whole ones, or the newest."""
    folders = [f for f in layout.checkpoints(plan.job.path) if not layout.faults_of(f)]
    return folders[-1:] if plan.config.explorer.bench_on_latest_checkpoint else folders


def broken_of(plan: RunPlan) -> dict[str, str]:
    """Name of each checkpoint that is not whole -> what is wrong with it."""
    found = {f.name: layout.faults_of(f) for f in layout.checkpoints(plan.job.path)}
    return {name: "; ".join(faults[:3]) for name, faults in found.items() if faults}


def config_of(actor: Path) -> dict[str, object]:
    """config.json of the model in a checkpoint; {} if there is none."""
    path = actor / layout.HUGGING_FACE / "config.json"
    found: dict[str, object] = json.loads(path.read_text()) if path.is_file() else {}
    return found
