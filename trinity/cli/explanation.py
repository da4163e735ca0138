"""What `trinity explain` says about one stage, as rows of text. Draws nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trinity.common.config import Config, GPUSplit, derive, split_gpus
from trinity.common.config.advice import find_advice
from trinity.common.config.arithmetic import Arithmetic, arithmetic_of
from trinity.common.config.gpus import gpus_per_engine
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.memory import (
    checkpoint_bytes,
    engine_memory,
    shards_of,
    trainer_memory,
)
from trinity.common.config.memory_parts import Part, micro_batch_tokens
from trinity.common.config.shape import ModelShape, find_shape
from trinity.common.config.training import training_settings
from trinity.common.constants import EngineType, Mode, SaveHF, TrainerType

Row = tuple[str, ...]

_SERVICE = "Tinker service"


@dataclass
class Explanation:
    """The answer of `trinity explain` for one stage."""

    title: str
    picture: str
    step: list[Row] = field(default_factory=list)
    batch_sizes: list[Row] = field(default_factory=list)
    places: list[Row] = field(default_factory=list)
    memory: dict[str, list[Part]] = field(default_factory=dict)
    checkpoints: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def explain_stage(name: str, config: Config, gpu_bytes: float) -> Explanation:
    """All about one stage. ``gpu_bytes`` is the memory of one GPU."""
    filled = derive(config).config
    cluster = filled.cluster
    nodes = max(cluster.node_num, 1) if cluster.gpu_per_node else 0
    split = split_gpus(filled, nodes, cluster.gpu_per_node)
    numbers = arithmetic_of(filled, split)
    title = f"{filled.project}/{filled.name}: {filled.algorithm.algorithm_type}, mode {filled.mode}"
    explanation = Explanation(title, _picture(filled, numbers, split))
    explanation.step = _step_rows(filled, numbers)
    if filled.mode.trains and not _is_at_service(filled):
        explanation.batch_sizes = _batch_rows(filled, numbers)
    explanation.places = _place_rows(filled, split)
    shape = find_shape(filled.model.model_path)
    if _is_at_service(filled):
        explanation.notes.append("The model is at the Tinker service, and takes no memory here.")
        _add_engine_memory(explanation, filled, gpu_bytes)
        explanation.checkpoints = _checkpoint_counts(filled)
    elif shape is None:
        explanation.notes.append(
            f"The size of {filled.model.model_path!r} is not known here, so no memory is estimated."
        )
    else:
        _add_memory(explanation, filled, split, shape, gpu_bytes)
        explanation.checkpoints = _checkpoint_rows(filled, shape)
    explanation.notes += _notes(config, filled)
    return explanation


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


def _step_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    rows: list[Row] = []
    if config.mode.explores:
        prompt, response = config.model.max_prompt_tokens, config.model.max_response_tokens
        rows += [
            ("tasks an explorer step", _number(numbers.tasks), "buffer.batch_size"),
            ("samples a task", _number(numbers.samples), "algorithm.repeat_times"),
            (
                "experiences an explorer step",
                _number(numbers.experiences),
                f"{numbers.tasks} x {numbers.samples}",
            ),
            (
                "prompt tokens, at most",
                _number(numbers.prompt_tokens),
                f"{numbers.tasks} x {prompt} (model.max_prompt_tokens)",
            ),
            (
                "sampled tokens, at most",
                _number(numbers.response_tokens),
                f"{numbers.experiences} x {response} (model.max_response_tokens)",
            ),
        ]
    if config.mode.trains:
        rows += _train_rows(config, numbers)
    if config.mode.pairs:
        rows += _sync_rows(config, numbers)
    steps = total_steps(config)
    if steps is not None and config.mode.explores:
        per_epoch = f"{config.buffer.total_epochs} epochs"
        why = "buffer.total_steps" if config.buffer.total_steps else per_epoch
        rows.append(("explorer steps of the run", _number(steps), why))
    return rows


def _train_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    updates = numbers.steps_per_explorer_step * numbers.epochs
    each = "explorer step" if config.mode.pairs else "training step"
    rows: list[Row] = [
        ("experiences a training step", _number(numbers.train_batch), "buffer.train_batch_size"),
        (
            "trained tokens, at most",
            _number(numbers.train_tokens),
            f"{numbers.train_batch} x {config.model.max_model_len} (model.max_model_len)",
        ),
        (
            f"optimizer updates an {each}" if config.mode.pairs else f"optimizer updates a {each}",
            _number(updates),
            f"{_number(numbers.steps_per_explorer_step)} training steps x {numbers.epochs} epochs",
        ),
    ]
    passes = (
        "micro-batches a GPU and update",
        f"<= {_number(numbers.micro_batches)}",
        f"{numbers.rows_per_gpu} experiences, {_pass_limit(config)} a pass",
    )
    return rows if _is_at_service(config) else [*rows, passes]


def _is_at_service(config: Config) -> bool:
    """Whether the Tinker service trains the model."""
    return config.trainer.trainer_type is TrainerType.TINKER


def _pass_limit(config: Config) -> str:
    limit = training_settings(config).actor.train
    if limit.max_tokens is not None:
        return f"{_number(limit.max_tokens)} tokens"
    return f"{limit.max_rows} experiences"


def _sync_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    sync = config.synchronizer
    stale = numbers.max_staleness
    bound = "unbounded" if stale is None else f"{stale} training steps"
    why = f"interval {sync.sync_interval}, offset {sync.sync_offset}, {sync.sync_style}"
    if stale is None:
        why += "; bound it by sample_strategy: staleness_control"
    return [
        ("a sync", _every(sync.sync_interval), f"{sync.sync_method}, {sync.sync_style}"),
        ("most off-policy, by", bound, why),
    ]


def _batch_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    settings = training_settings(config)
    rows = settings.actor.train.max_rows
    per_gpu = f"{numbers.train_batch} / {numbers.copies}"
    micro = f"{rows}" if rows else f"by tokens: <= {_number(settings.actor.train.max_tokens or 0)}"
    micro_why = (
        "experiences of one pass on one GPU"
        if rows
        else "trainer.use_dynamic_bsz fills passes up to trainer.max_token_len_per_gpu"
    )
    count = f"<= {numbers.micro_batches}"
    return [
        ("buffer.batch_size", _number(config.buffer.batch_size), "tasks of an explorer step"),
        (
            "buffer.train_batch_size",
            _number(numbers.train_batch),
            "experiences of an update (a mini-batch), over all GPUs",
        ),
        (
            "ppo_mini_batch_size",
            _number(numbers.rows_per_gpu),
            f"veRL's name for it; on each GPU {per_gpu}",
        ),
        ("ppo_micro_batch_size_per_gpu", micro, micro_why),
        ("gradient accumulation", count, "micro-batches added up before an update"),
    ]


def _place_rows(config: Config, split: GPUSplit) -> list[Row]:
    rows: list[Row] = []
    taken = 0
    for part, model in _engines(config):
        for engine in range(model.engine_num):
            size = gpus_per_engine(model) if split.total else 0
            name = f"{part}, engine {engine}"
            where = _gpu_range(split, taken, size)
            is_there = model.engine_type is EngineType.TINKER
            rows.append((name, _SERVICE if is_there else where, _engine_text(model)))
            taken += size
    if config.mode.trains:
        if config.mode is Mode.COLOCATE:
            taken = split.auxiliary
        kind = f"{config.trainer.trainer_type}, {config.trainer.trainer_strategy}"
        where = _gpu_range(split, taken, split.trainer)
        if _is_at_service(config):
            kind, where = f"tinker, an adapter of rank {config.model.tinker.rank}", _SERVICE
        rows.append(("trainer", where, kind))
    return rows


def _gpu_range(split: GPUSplit, start: int, size: int) -> str:
    if split.total == 0:
        return "found at start"
    if size < 1:
        return "none"
    first, last = start, start + size - 1
    if split.nodes == 1:
        return f"{first}" if size == 1 else f"{first}-{last}"
    return f"{_gpu_name(split, first)} to {_gpu_name(split, last)}"


def _gpu_name(split: GPUSplit, index: int) -> str:
    return f"{index // split.per_node}.{index % split.per_node}"


def _engine_text(model: InferenceModelConfig) -> str:
    return f"{model.engine_type}: {model.model_path}"


def _add_memory(
    explanation: Explanation,
    config: Config,
    split: GPUSplit,
    shape: ModelShape,
    gpu_bytes: float,
) -> None:
    if shape.is_guess:
        explanation.notes.append(
            f"{config.model.model_path} is not on this machine; its shape is a usual one for "
            "the size in its name."
        )
    if config.mode.trains:
        parts = trainer_memory(config, shape, shards_of(split), gpu_bytes)
        title = "memory of a trainer GPU, estimated" if split.total else "memory of the trainer"
        explanation.memory[title] = parts
        _judge(explanation, "trainer", parts, gpu_bytes)
    _add_engine_memory(explanation, config, gpu_bytes)


def _add_engine_memory(explanation: Explanation, config: Config, gpu_bytes: float) -> None:
    for name, model in _engines(config):
        own = find_shape(model.model_path or "")
        if own is not None and model.engine_type in ("vllm", "torch"):
            parts = engine_memory(model, own, gpu_bytes, config.explorer.runner_per_model)
            explanation.memory[f"memory of {_one_engine(name, model, gpu_bytes)}"] = parts
            _judge(explanation, "rollout", parts, gpu_bytes)


def _engines(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    if not config.mode.explores:
        return []
    models = [("rollout model", config.explorer.rollout_model)]
    for index, model in enumerate(config.explorer.auxiliary_models):
        models.append((f"auxiliary model {index}", model))
    return models


def _one_engine(name: str, model: InferenceModelConfig, gpu_bytes: float) -> str:
    if model.engine_type == "torch":
        return f"an engine of the {name}, at most"
    return f"a GPU of the {name} with {gpu_bytes / 2**30:.0f} GiB, estimated"


def _judge(explanation: Explanation, part: str, parts: list[Part], gpu_bytes: float) -> None:
    total = sum(item.bytes for item in parts)
    if total > gpu_bytes:
        explanation.notes.append(
            f"A {part} GPU would need {total / 2**30:.0f} GiB and has {gpu_bytes / 2**30:.0f}: "
            + _RELIEF[part]
        )


_RELIEF = {
    "trainer": "set trainer.enable_gradient_checkpointing, lower trainer.max_token_len_per_gpu, "
    "or set trainer.optimizer_offload.",
    "rollout": "raise explorer.rollout_model.tensor_parallel_size.",
}


def _checkpoint_rows(config: Config, shape: ModelShape) -> list[Row]:
    if not config.mode.trains:
        return []
    state, hf = checkpoint_bytes(config, shape)
    rows = _checkpoint_counts(config)
    rows.append(("training state of one", _size(state), "weights, optimizer, 12 bytes a weight"))
    save_hf = config.trainer.save_hf_checkpoint
    if save_hf is not SaveHF.NEVER:
        which = "each" if save_hf is SaveHF.ALWAYS else "the last"
        rows.append((f"Hugging Face files of {which}", _size(hf), "2 bytes a weight"))
    return rows


def _checkpoint_counts(config: Config) -> list[Row]:
    if not config.mode.trains:
        return []
    every = config.trainer.save_interval
    total = config.trainer.total_steps or total_steps(config)
    when = f"{_every(every)} and at the end" if every else "at the end"
    count = str(_saves(total, every)) if total else when
    kept = config.trainer.max_checkpoints_to_keep
    return [
        ("checkpoints", count, f"trainer.save_interval: {every}"),
        ("kept", str(kept or "all"), "trainer.max_checkpoints_to_keep"),
    ]


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _age(steps: int | None) -> str:
    if steps == 0:
        return "of the newest weights"
    return "of any age" if steps is None else f"at most {steps} steps old"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def total_steps(config: Config) -> int | None:
    """Explorer steps of the run; None where the number of tasks is not known here."""
    if config.buffer.total_steps or not config.mode.explores:
        return config.buffer.total_steps
    counts = [_rows(taskset.path or "") for taskset in config.buffer.explorer_input.tasksets]
    if not counts or None in counts:
        return None
    tasks = sum(count for count in counts if count is not None)
    return tasks * config.buffer.total_epochs // config.buffer.batch_size


def _rows(path: str) -> int | None:
    """Lines of a local jsonl file; None for data of any other kind."""
    file = Path(path).expanduser()
    if file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _saves(total: int, every: int) -> int:
    if not every:
        return 1
    return total // every + (1 if total % every else 0)


def _size(amount: float) -> str:
    return f"{amount / 1e9:.2f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"


def _notes(config: Config, filled: Config) -> list[str]:
    notes = find_advice(config)
    longest = filled.model.max_model_len or 0
    if filled.mode.trains and longest and not _is_at_service(filled):
        held = micro_batch_tokens(filled, training_settings(filled).actor)
        notes.append(
            f"One pass holds up to {held:,} tokens; the longest experience has {longest:,}."
        )
    return notes


def _picture(config: Config, numbers: Arithmetic, split: GPUSplit) -> str:
    """The loop of a run with its numbers on the arrows."""
    if not config.mode.explores:
        return _training_picture(numbers, split)
    gpus = _gpus(split.rollout) if split.total else "engines"
    made = f"{numbers.tasks} tasks x {numbers.samples} samples"
    lines = [f"  tasks --[{made}]--> explorer ({gpus})"]
    if not config.mode.pairs:
        where = "metrics" if config.mode is Mode.BENCH else "experience buffer"
        lines.append(f"                  --[{numbers.experiences} experiences]--> {where}")
        return "\n".join(lines)
    trainer = _gpus(split.trainer) if split.total else "1 process"
    steps = _number(numbers.steps_per_explorer_step)
    sync = config.synchronizer
    travel = f"weights, {sync.sync_method}, {_every(sync.sync_interval)}"
    lines += [
        "    ^                 |",
        f"    |                 +--[{numbers.experiences} experiences]--> buffer",
        "    |                                             |",
        f"    |                {numbers.train_batch} a training step, {steps} for an explorer step",
        "    |                                             v",
        f"    +--[{travel}]-- trainer ({trainer})",
        "",
        f"  what is trained on is {_age(numbers.max_staleness)}",
    ]
    return "\n".join(lines)


def _training_picture(numbers: Arithmetic, split: GPUSplit) -> str:
    trainer = _gpus(split.trainer) if split.total else "1 process"
    return f"  data set --[{numbers.train_batch} rows a step]--> trainer ({trainer})"
