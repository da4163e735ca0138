"""A `RunPlan` on the screen: who runs where, what a step is, what would be faster."""

from pathlib import Path

from rich.table import Table

from trinity.checkpoint import layout
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.launcher.plan import RunPlan
from trinity.launcher.screen import Screen
from trinity.utils.processor import has_bfloat16
from trinity.utils.words import counted

_MANY_NEW_TOKENS = 200_000  # 135M parameters on two cores: ten minutes of sampling


def show_plan(plan: RunPlan, screen: Screen, total_steps: int | None = None) -> None:
    """Show what runs where, and say what a step of ``total_steps`` is."""
    screen.show(_table(plan))
    if plan.config.mode is not Mode.BENCH:
        screen.say(_step(plan, total_steps))
    for hint in speed_hints(plan):
        screen.say(hint)


def _table(plan: RunPlan) -> Table:
    config = plan.config
    table = Table(title=f"plan of {config.project}/{config.name}", title_style="bold")
    table.add_column("part")
    table.add_column("what runs", overflow="fold")
    table.add_column("where")
    for row in [*_explorer_rows(plan), *_trainer_rows(plan)]:
        table.add_row(*row)
    return table


def _explorer_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    config, explorer = plan.config, plan.config.explorer
    if not config.mode.explores:
        return []
    rollout = explorer.rollout_model
    rows = [("engine", _engine_text(rollout), _where(plan, rollout, plan.gpus.explorer))]
    rows += [
        ("auxiliary model", _engine_text(model), _where(plan, model, plan.gpus.auxiliary))
        for model in explorer.auxiliary_models
    ]
    if config.mode is Mode.SERVE:  # its users are the rollouts
        return [*rows, ("API", f"{explorer.listen_address}:{explorer.proxy_port}", "CPU")]
    runners = f"processes: {plan.num_runners}, slots of each: {plan.slots}"
    return [*rows, ("workflows", runners, "CPU")]


def _trainer_rows(plan: RunPlan) -> list[tuple[str, str, str]]:
    config = plan.config
    if not config.mode.trains:
        return []
    kind = f"{config.trainer.trainer_type}, {config.algorithm.algorithm_type}"
    if config.trainer.trainer_type is TrainerType.TINKER:
        rows = [("trainer", f"{kind}, rank {config.model.tinker.rank}", "Tinker service")]
    else:
        rows = [("trainer", f"{kind}, {config.trainer.dtype}", _where_trained(plan))]
    if config.mode.pairs:
        sync = config.synchronizer
        every = f"interval {sync.sync_interval}, offset {sync.sync_offset}"
        rows.append(("weights", f"{sync.sync_method}, {sync.sync_style}, {every}", ""))
    return rows


def _where_trained(plan: RunPlan) -> str:
    ranks = plan.num_ranks
    if plan.gpus.total:
        return counted(ranks, "GPU") + (", in turns with the engine" if plan.is_colocated else "")
    return f"CPU, {plan.cores} threads" if ranks == 1 else f"CPU, {ranks} processes"


def _where(plan: RunPlan, model: InferenceModelConfig, gpus: int) -> str:
    if model.engine_type is EngineType.OPENAI:
        return "outside service"
    if model.engine_type is EngineType.TINKER:
        return "Tinker service"
    return counted(gpus, "GPU") if gpus else f"CPU, {plan.cores} threads"


def _step(plan: RunPlan, total_steps: int | None) -> str:
    config = plan.config
    steps = f", {counted(total_steps, 'step')}" if total_steps else ""
    if not config.mode.explores:
        return f"a step: {config.buffer.train_batch_size} rows{steps}"
    longest = config.model.max_response_tokens
    tokens = f", at most {counted(longest, 'new token')} a reply" if longest else ""
    if config.mode is Mode.SERVE:
        return f"a step: a commit of up to {config.buffer.train_batch_size} replies{tokens}{steps}"
    prompts, samples = config.buffer.batch_size, config.sample_span
    made = f"{prompts} prompts x {samples} samples = {samples.times(prompts)}"
    return f"a step: {made}{tokens}{steps}"


def _most_new_tokens(plan: RunPlan) -> int:
    """Of a step; 0 if that is not known."""
    config = plan.config
    samples = config.sample_span.most * config.buffer.batch_size
    return int(samples) * (config.model.max_response_tokens or 0)


def speed_hints(plan: RunPlan) -> list[str]:
    """What would make the run faster on this machine's CPU."""
    return [hint for hint in (_size_hint(plan), _format_hint(plan)) if hint]


def _format_hint(plan: RunPlan) -> str | None:
    """Which number format this processor is faster in, if it is another one."""
    config = plan.config
    asked: dict[str, str] = {}
    if config.mode.trains and config.trainer.trainer_type is TrainerType.TORCH:
        asked["trainer.dtype"] = config.trainer.dtype
    rollout = config.explorer.rollout_model
    if config.mode.explores and _engine_is_here(rollout):
        asked["explorer.rollout_model.dtype"] = rollout.dtype
    slow = [key for key, name in asked.items() if name == "bfloat16"]
    if plan.gpus.total or not slow or has_bfloat16():
        return None
    return (
        "This processor has no instructions for bfloat16; float32 is several times faster: "
        + " ".join(f"{key}=float32" for key in slow)
        + "."
    )


def _size_hint(plan: RunPlan) -> str | None:
    """How a step becomes smaller, if it is large for a CPU."""
    explores = plan.config.mode.explores and plan.config.mode is not Mode.BENCH
    if not explores or plan.gpus.total or _most_new_tokens(plan) <= _MANY_NEW_TOKENS:
        return None
    return (
        "On a CPU such a step may take ten minutes and more. Smaller: buffer.batch_size, "
        "algorithm.repeat_times, model.max_response_tokens."
    )


def _engine_text(model: InferenceModelConfig) -> str:
    number = f"{model.engine_num} x " if model.engine_num > 1 else ""
    what = [f"{number}{model.engine_type}", _model_name(model.model_path or "")]
    if _engine_is_here(model):
        what.append(model.dtype)
    return ", ".join(part for part in what if part)


def _engine_is_here(model: InferenceModelConfig) -> bool:
    return model.engine_type not in (EngineType.TINKER, EngineType.OPENAI)


def _model_name(path: str) -> str:
    """The end of ``path`` that tells which model it is: of a checkpoint, its run and step."""
    parts = Path(path).parts
    if parts[-2:] == (layout.ACTOR, layout.HUGGING_FACE):
        return "/".join(parts[-4:-2])
    return parts[-1] if parts else ""
