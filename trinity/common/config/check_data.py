"""Checks of `buffer:` and `data_processor:`."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.buffer import DataSelectorConfig, TasksetConfig
from trinity.common.config.case import Case, Check
from trinity.common.config.derive_data import EXPERIENCES, INPUT
from trinity.common.config.names import builtin_names
from trinity.common.constants import Mode, PromptType, StorageType
from trinity.common.errors import Problem

_GENERATORS = (StorageType.REASONING_GYM, StorageType.VERIFIERS)
_TASK_STORAGE = (StorageType.FILE, StorageType.SQL, *_GENERATORS)
_NAMED_AT: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "WORKFLOWS": ("default_workflow_type",),
        "REWARD_FUNCTIONS": ("default_reward_fn_type",),
    },
    {
        "WORKFLOWS": ("default_workflow_type", "default_eval_workflow_type"),
        "REWARD_FUNCTIONS": ("default_reward_fn_type",),
    },
)
"""Registry -> keys that name its entries, of training and of evaluation tasks."""

_FEATURES = {"difficulty_based": 2, "offline_easy2hard": 1}


def _tasksets(case: Case) -> Iterator[Problem]:
    tasks, mode = case.given.buffer.explorer_input, case.config.mode
    if tasks.taskset is not None and tasks.tasksets:
        message = f"`{INPUT}.tasksets` is given too."
        yield Problem(f"{INPUT}.taskset", message, "Move it into the list of `tasksets`.")
    needs_tasks = mode in (Mode.BOTH, Mode.EXPLORE, Mode.COLOCATE) and _takes_rollouts(case)
    if needs_tasks and tasks.taskset is None and not tasks.tasksets and not _makes_tasks(case):
        message = f"Mode {mode} needs tasks to train on, and there are none."
        fix = "Add `taskset:` with its `path` below `buffer.explorer_input`."
        yield Problem(f"{INPUT}.taskset", message, fix)
    if mode is Mode.BENCH and not tasks.eval_tasksets:
        message = "Mode bench needs tasks to evaluate on, and there are none."
        fix = "Add `eval_tasksets:` below `buffer.explorer_input`."
        yield Problem(f"{INPUT}.eval_tasksets", message, fix)


def _takes_rollouts(case: Case) -> bool:
    return case.spec.schema == "experience"


def _makes_tasks(case: Case) -> bool:
    pipeline = case.config.data_processor.task_pipeline
    return pipeline is not None and pipeline.output is not None


def tasksets_of(case: Case) -> Iterator[tuple[str, str, TasksetConfig]]:
    """Key of each taskset of a run as filled in, its key as written, and itself."""
    if not case.config.mode.explores:
        return
    tasks = case.config.buffer.explorer_input
    single = case.given.buffer.explorer_input.taskset is not None
    for kind in ("tasksets", "eval_tasksets"):
        for index, taskset in enumerate(getattr(tasks, kind)):
            key = f"{INPUT}.{kind}.{index}"
            yield key, f"{INPUT}.taskset" if single and kind == "tasksets" else key, taskset


def _each_taskset(case: Case) -> Iterator[Problem]:
    for key, shown, taskset in tasksets_of(case):
        for problem in _taskset(case, key, taskset):
            yield _renamed(problem, key, shown)
        is_eval = key.startswith(f"{INPUT}.eval_tasksets")
        for registry, names in _NAMED_AT[is_eval].items():
            for problem in case.unknown(f"{key}.{names[0]}", registry):
                yield _renamed(problem, f"{key}.{names[0]}", _written_at(case, shown, names))


def _written_at(case: Case, key: str, names: tuple[str, ...]) -> str:
    """Where the name was written: in the taskset, or as a default for all."""
    places = [f"{key}.{names[0]}", *(f"{INPUT}.{name}" for name in names[::-1])]
    return next((place for place in places if case.is_set(place)), places[0])


def _renamed(problem: Problem, key: str, shown: str) -> Problem:
    name = shown + problem.key[len(key) :]
    return Problem(name, problem.message, problem.fix, problem.value)


def _taskset(case: Case, key: str, taskset: TasksetConfig) -> Iterator[Problem]:
    if not taskset.path:
        wanted = "the name of the data set" if taskset.storage_type in _GENERATORS else "a path"
        message = f"Tasks from `{taskset.storage_type}` need {wanted}."
        yield Problem(f"{key}.path", message, "Add `path: ...` to it.")
    if taskset.storage_type not in _TASK_STORAGE:
        message = "Tasks are read, not queued."
        fix = "Use `file`, `sql`, `reasoning_gym` or `verifiers`."
        yield case.problem(f"{key}.storage_type", message, fix)
    yield from _selector(case, f"{key}.data_selector", taskset.data_selector)


def _selector(case: Case, key: str, selector: DataSelectorConfig) -> Iterator[Problem]:
    yield from case.unknown(f"{key}.selector_type", "SELECTORS")
    wanted = _FEATURES.get(selector.selector_type, 0)
    found = len(selector.feature_keys)
    exact = selector.selector_type == "difficulty_based"
    if found < wanted or (exact and found != wanted):
        count = f"exactly {wanted} columns" if exact else "a column"
        message = f"`{selector.selector_type}` needs {count} in `feature_keys`; here are {found}."
        fix = "Add them as `feature_keys: [column, ...]`."
        yield Problem(f"{key}.feature_keys", message, fix)


def _unique_names(case: Case) -> Iterator[Problem]:
    tasks, inputs = case.config.buffer.explorer_input, case.config.buffer.trainer_input
    sets = {f"{INPUT}.tasksets.{i}": item.name for i, item in enumerate(tasks.tasksets)}
    sets |= {f"{INPUT}.eval_tasksets.{i}": item.name for i, item in enumerate(tasks.eval_tasksets)}
    yield from _repeated(case, sets, "their metrics would be one")
    buffers = {EXPERIENCES: inputs.experience_buffer.name} if inputs.experience_buffer else {}
    for name, buffer in inputs.auxiliary_buffers.items():
        buffers[f"buffer.trainer_input.auxiliary_buffers.{name}"] = buffer.name
    yield from _repeated(case, buffers, "their files would be one")


def _repeated(case: Case, names: dict[str, str], why: str) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for key, name in names.items():
        if name in seen:
            message = f"`{seen[name]}` has this name too; {why}."
            yield case.problem(f"{key}.name", message, "Give it another name.")
        seen.setdefault(name, key)


def _batch(case: Case) -> Iterator[Problem]:
    buffer = case.config.buffer
    if not case.config.mode.trains or buffer.train_batch_size:
        return
    message = "Training on a data set needs the number of rows of one step."
    yield Problem("buffer.train_batch_size", message, "Add `train_batch_size: 32` below `buffer`.")


def _experience_buffer(case: Case) -> Iterator[Problem]:
    buffer = case.config.buffer.trainer_input.experience_buffer
    if buffer is None or case.config.mode is Mode.BENCH:
        return
    offline = case.spec.schema != "experience"
    if offline and not buffer.path and case.config.mode.trains:
        name = case.config.algorithm.algorithm_type
        message = f"{name} trains on a data set, and none is named."
        fix = "Add `experience_buffer:` with its `path` below `buffer.trainer_input`."
        yield Problem(f"{EXPERIENCES}.path", message, fix)
    if not offline and buffer.storage_type is StorageType.FILE and case.config.mode.pairs:
        message = f"A file cannot be written and read at once (mode {case.config.mode})."
        fix = "Use `queue`; with a `path` it keeps a copy there."
        yield case.problem(f"{EXPERIENCES}.storage_type", message, fix)
    if buffer.storage_type in _GENERATORS:
        fix = "Use `queue`, `sql` or `file`."
        yield case.problem(f"{EXPERIENCES}.storage_type", "This makes tasks only.", fix)
    sides = {"READER": case.config.mode.trains, "WRITER": case.config.mode.explores}
    for registry in (name for name, is_used in sides.items() if is_used):
        yield from case.unknown(f"{EXPERIENCES}.storage_type", registry, _GENERATORS)
    yield from _queue(case)


def _schemas(case: Case) -> Iterator[Problem]:
    """What rows are: of a known kind, and pairs where pairs are trained on and nowhere else."""
    inputs, name = case.config.buffer.trainer_input, case.config.algorithm.algorithm_type
    for place in inputs.auxiliary_buffers:
        key = f"buffer.trainer_input.auxiliary_buffers.{place}.schema_type"
        yield from case.unknown(key, "FORMATTER")
    key = f"{EXPERIENCES}.schema_type"
    if inputs.experience_buffer is None or not case.config.mode.trains:
        return
    yield from case.unknown(key, "FORMATTER")
    schema, wanted = inputs.experience_buffer.schema_type, case.spec.schema
    is_raw = schema in builtin_names()["FORMATTER"] - {"experience"}  # that may be either
    if is_raw and name in ALGORITHMS and (schema == "dpo") != (wanted == "dpo"):
        answers = "pairs of answers" if wanted == "dpo" else "single answers"
        message = f"{name} trains on {answers}; this says that rows are others."
        yield case.problem(key, message, f"Remove it, or set `schema_type: {wanted}`.")


def _queue(case: Case) -> Iterator[Problem]:
    buffer = case.config.buffer.trainer_input.experience_buffer
    assert buffer is not None
    is_queue = buffer.storage_type is StorageType.QUEUE
    needed = case.config.buffer.train_batch_size
    if is_queue and buffer.capacity < needed:
        message = f"One training step reads {needed} experiences (buffer.train_batch_size)."
        fix = f"Set it to {2 * needed} or more."
        yield case.problem(f"{EXPERIENCES}.capacity", message, fix)
    if buffer.replay_buffer.enable:
        yield from case.unknown(f"{EXPERIENCES}.replay_buffer.priority_fn", "PRIORITY_FUNC")
    if buffer.replay_buffer.enable and not is_queue:
        message = f"Only a queue replays; this buffer is `{buffer.storage_type}`."
        fix = "Set `storage_type: queue`, or remove it."
        yield case.problem(f"{EXPERIENCES}.replay_buffer.enable", message, fix)


def _auxiliary_buffers(case: Case) -> Iterator[Problem]:
    for name, buffer in case.config.buffer.trainer_input.auxiliary_buffers.items():
        key = f"buffer.trainer_input.auxiliary_buffers.{name}"
        yield from case.unknown(f"{key}.storage_type", "READER")
        if not buffer.path and isinstance(buffer.storage_type, StorageType):
            message = "A further data set needs its path."
            yield Problem(f"{key}.path", message, "Add `path: ...` to it.")


def _data_sets_with_images(case: Case) -> Iterator[Problem]:
    inputs = case.config.buffer.trainer_input
    buffers = {EXPERIENCES: inputs.experience_buffer} if inputs.experience_buffer else {}
    for name, buffer in inputs.auxiliary_buffers.items():
        buffers[f"buffer.trainer_input.auxiliary_buffers.{name}"] = buffer
    trainer = case.config.trainer.trainer_type
    for key, buffer in buffers.items():
        is_plain = buffer.format.prompt_type is PromptType.PLAINTEXT
        for name in ("image_key", "video_key"):
            if not getattr(buffer.format, name):
                continue
            if buffer.schema_type != "sft" or not is_plain:
                message = "Of data sets of answers only SFT ones with plain text have images."
                fix = "Remove it, or set `schema_type: sft` and `format.prompt_type: plaintext`."
                yield case.problem(f"{key}.format.{name}", message, fix)
            elif trainer != "torch":
                message = f"`trainer_type: {trainer}` trains on texts only."
                fix = "Remove it, or set `trainer.trainer_type: torch`."
                yield case.problem(f"{key}.format.{name}", message, fix)


def _pipelines(case: Case) -> Iterator[Problem]:
    given, key = case.given, "data_processor.experience_pipeline.output"
    output = given.data_processor.experience_pipeline.output
    if output is not None and given.buffer.trainer_input.experience_buffer not in (None, output):
        message = f"`{EXPERIENCES}` says too, and otherwise, where experiences go."
        yield Problem(key, message, "Remove one of the two.")
    key = "data_processor.experience_pipeline.operators"
    operators = case.config.data_processor.experience_pipeline.operators
    for index in range(len(operators)):
        yield from case.unknown(f"{key}.{index}.name", "EXPERIENCE_OPERATORS")
    pipeline = case.config.data_processor.task_pipeline
    if pipeline is None:
        return
    key = "data_processor.task_pipeline"
    if pipeline.operators and pipeline.config_path:
        message = f"`{key}.operators` is given too, and both say what to do."
        yield case.problem(f"{key}.config_path", message, "Remove one of the two.")
    if not pipeline.inputs:
        message = "The pipeline has nothing to work on."
        yield Problem(f"{key}.inputs", message, "Add `inputs:` with a path.")


DATA_CHECKS: tuple[Check, ...] = (
    _tasksets,
    _each_taskset,
    _unique_names,
    _batch,
    _experience_buffer,
    _auxiliary_buffers,
    _schemas,
    _data_sets_with_images,
    _pipelines,
)
