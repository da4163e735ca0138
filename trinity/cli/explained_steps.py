"""What `trinity explain` says of the steps of a run: how much of everything a step takes."""

from pathlib import Path

from trinity.cli.explained_words import Row, is_at_service
from trinity.common.config import Config
from trinity.common.config.arithmetic import Arithmetic
from trinity.common.config.training import training_settings
from trinity.utils.words import counted, every, number


def step_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    """Tasks, experiences and tokens of a step, and how far apart both sides may be."""
    rows: list[Row] = []
    if config.mode.explores:
        prompt, response = config.model.max_prompt_tokens, config.model.max_response_tokens
        rows += [
            ("tasks an explorer step", number(numbers.tasks), "buffer.batch_size"),
            ("samples a task", str(numbers.samples), _repeats_from(config)),
            (
                "experiences an explorer step",
                str(numbers.experiences),
                f"{numbers.tasks} x {numbers.samples}",
            ),
            (
                "prompt tokens, at most",
                number(numbers.prompt_tokens),
                f"{numbers.tasks} x {prompt} (model.max_prompt_tokens)",
            ),
            (
                "sampled tokens, at most",
                number(numbers.response_tokens),
                f"{number(numbers.experiences.most)} x {response} (model.max_response_tokens)",
            ),
        ]
    if config.mode.trains:
        rows += _train_rows(config, numbers)
    if config.mode.pairs:
        rows += _sync_rows(config, numbers)
    steps = total_steps(config)
    if steps is not None and config.mode.explores:
        per_epoch = counted(config.buffer.total_epochs, "epoch")
        why = "buffer.total_steps" if config.buffer.total_steps else per_epoch
        rows.append(("explorer steps of the run", number(steps), why))
    return rows


def _repeats_from(config: Config) -> str:
    usual = config.algorithm.repeat_times or 1
    is_usual = config.sample_span == (usual, usual)
    return "algorithm.repeat_times" if is_usual else "repeat_times of the tasksets"


def _train_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    updates = numbers.steps_per_explorer_step.times(numbers.epochs)
    each = "explorer step" if config.mode.pairs else "training step"
    rows: list[Row] = [
        ("experiences a training step", number(numbers.train_batch), "buffer.train_batch_size"),
        (
            "trained tokens, at most",
            number(numbers.train_tokens),
            f"{numbers.train_batch} x {config.model.max_model_len} (model.max_model_len)",
        ),
        (
            f"optimizer updates an {each}" if config.mode.pairs else f"optimizer updates a {each}",
            str(updates),
            f"{numbers.steps_per_explorer_step} training steps x "
            f"{counted(numbers.epochs, 'epoch')}",
        ),
    ]
    passes = (
        "micro-batches a GPU and update",
        f"<= {number(numbers.micro_batches)}",
        f"{numbers.rows_per_gpu} experiences, {_pass_limit(config)} a pass",
    )
    return rows if is_at_service(config) else [*rows, passes]


def _pass_limit(config: Config) -> str:
    limit = training_settings(config).actor.train
    if limit.max_tokens is not None:
        return f"{number(limit.max_tokens)} tokens"
    return f"{limit.max_rows} experiences"


def _sync_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    sync = config.synchronizer
    stale = numbers.max_staleness
    bound = "unbounded" if stale is None else f"{stale} training steps"
    why = f"interval {sync.sync_interval}, offset {sync.sync_offset}, {sync.sync_style}"
    if stale is None:
        why += "; bound it by sample_strategy: staleness_control"
    return [
        ("a sync", every(sync.sync_interval), f"{sync.sync_method}, {sync.sync_style}"),
        ("most off-policy, by", bound, why),
    ]


def batch_rows(config: Config, numbers: Arithmetic) -> list[Row]:
    """The batch sizes, by the names that configurations have for them."""
    settings = training_settings(config)
    rows = settings.actor.train.max_rows
    per_gpu = f"{numbers.train_batch} / {numbers.copies}"
    micro = f"{rows}" if rows else f"by tokens: <= {number(settings.actor.train.max_tokens or 0)}"
    micro_why = (
        "experiences of one pass on one GPU"
        if rows
        else "trainer.use_dynamic_bsz fills passes up to trainer.max_token_len_per_gpu"
    )
    count = f"<= {numbers.micro_batches}"
    return [
        ("buffer.batch_size", number(config.buffer.batch_size), "tasks of an explorer step"),
        (
            "buffer.train_batch_size",
            number(numbers.train_batch),
            "experiences of an update (a mini-batch), over all GPUs",
        ),
        (
            "ppo_mini_batch_size",
            number(numbers.rows_per_gpu),
            f"veRL's name for it; on each GPU {per_gpu}",
        ),
        ("ppo_micro_batch_size_per_gpu", micro, micro_why),
        ("gradient accumulation", count, "micro-batches added up before an update"),
    ]


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
