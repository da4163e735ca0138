"""Which data set the `trinity data` commands are about: one of a config, or one given by path."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trinity.buffer.check import check_experience_buffer, check_taskset
from trinity.buffer.convert import is_database
from trinity.buffer.data_set import is_data_set, rows_of_data_set
from trinity.buffer.inspection import ExperienceViewer, TaskViewer, Viewer
from trinity.buffer.rows import Row, Rows
from trinity.buffer.schema import FORMATTER
from trinity.buffer.schema.task import TaskFormatter
from trinity.buffer.taskset import rows_of
from trinity.cli.plugin_folders import load_plugin_folders
from trinity.cli.usage import UsageError
from trinity.common.config import Config
from trinity.common.config.buffer import ExperienceBufferConfig, FormatConfig, TasksetConfig
from trinity.common.config.model import ModelConfig
from trinity.common.constants import OnBadRow, StorageType
from trinity.common.errors import ConfigError, Problem
from trinity.utils.registry import UnknownNameError

if TYPE_CHECKING:
    from trinity.common.models.vision import Vision

Section = TasksetConfig | ExperienceBufferConfig


@dataclass(frozen=True)
class DataSet:
    """A data set, opened.

    Args:
        check: Raises `RowFault` for a row that can't be used.
        viewer: Shows a row as the model will see it.
        unit: What lengths count: "tokens", or "characters" without a tokenizer.
        compared: Column that repetitions are found by; empty: whole rows.
        hint: What to give for a better view; empty: nothing.
    """

    name: str
    rows: Rows
    check: Callable[[Row], object]
    viewer: Viewer
    unit: str
    compared: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Named:
    """What the arguments of a command say of a data set: one of ``config``, or that at ``path``.

    Args:
        name: Of the data set in the config; None: its first.
        kind: What its rows are: "task", or a name of `FORMATTER`.
        key: Keys of its format, as ``<key>=<value>``.
    """

    path: str | None
    config: Path | None
    name: str | None
    split: str
    subset: str | None
    table: str
    kind: str
    key: Sequence[str] | None
    model: str | None
    workflow: str | None
    plugin_dir: Sequence[Path] | None


def find_data_set(named: Named) -> DataSet:
    """The data set that the arguments of a command name.

    Raises:
        UsageError: They name none.
        ConfigError: The configuration or the data set can't be used.
    """
    load_plugin_folders(named.plugin_dir or [])
    if named.config is not None:
        return _opened(*_of_config(named.config, named.name))
    if named.path is None:
        raise UsageError("Name a data set: a path, or a configuration with --config.")
    try:
        return _of_path(named.path, named)
    except ConfigError as error:  # there is no configuration whose key it could name
        raise UsageError("\n".join(problem.message for problem in error.problems)) from error


def _of_path(path: str, named: Named) -> DataSet:
    form = _format(named.key or [])
    if named.kind not in ("task", *FORMATTER.names()):
        raise UsageError(f"--kind is {named.kind!r}; use task, {', '.join(FORMATTER.names())}.")
    common: dict[str, Any] = {
        "name": named.table or Path(path).stem,
        "path": path,
        "storage_type": StorageType.SQL if is_database(path) else StorageType.FILE,
        "split": named.split,
        "subset_name": named.subset,
        "format": form,
    }
    section: Section = (
        TasksetConfig(**common, default_workflow_type=named.workflow)
        if named.kind == "task"
        else ExperienceBufferConfig(**common, schema_type=named.kind)
    )
    return _opened(section, ModelConfig(model_path=named.model or ""))


def _format(keys: Sequence[str]) -> FormatConfig:
    pairs = {}
    for text in keys:
        name, equals, value = text.partition("=")
        if not equals or name not in FormatConfig.model_fields:
            known = ", ".join(FormatConfig.model_fields)
            raise UsageError(f"--key {text!r} is not <key>=<value> with one of the keys {known}.")
        pairs[name] = value
    try:
        return FormatConfig.model_validate(pairs)
    except ValidationError as error:
        fault = error.errors()[0]
        name = str(fault["loc"][0])
        raise UsageError(f"--key {name}={pairs[name]}: {fault['msg']}.") from None


def _of_config(path: Path, name: str | None) -> tuple[Section, ModelConfig]:
    from trinity.common.config import derive, iterate_stages, load_config

    found: dict[str, tuple[Section, ModelConfig]] = {}
    for _, stage in iterate_stages(load_config(str(path))):
        derived = derive(stage).config
        for section in _sections(derived):
            found.setdefault(section.name, (section, derived.model))
    if not found:
        raise UsageError(f"{path} names no data set.")
    if name is None:
        return next(iter(found.values()))
    if name not in found:
        raise UsageError(f"{path} has no data set {name!r}. It has: {', '.join(found)}.")
    return found[name]


def _sections(config: Config) -> list[Section]:
    tasks, inputs = config.buffer.explorer_input, config.buffer.trainer_input
    sections: list[Section] = [*tasks.tasksets, *tasks.eval_tasksets]
    buffers = [inputs.experience_buffer, *inputs.auxiliary_buffers.values()]
    sections += [b for b in buffers if b is not None and is_data_set(b)]
    return [section for section in sections if section.path]


def _opened(section: Section, model: ModelConfig) -> DataSet:
    lenient = section.model_copy(update={"on_bad_row": OnBadRow.SKIP})
    if isinstance(lenient, TasksetConfig):
        _refuse(check_taskset(lenient))
        return _tasks(lenient, model)
    _refuse(check_experience_buffer(lenient))
    return _experiences(lenient, model)


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _tasks(section: TasksetConfig, model: ModelConfig) -> DataSet:
    _refuse_unknown_names(section)
    form = section.format
    has_images = bool(form.image_key or form.video_key)
    chat = _chat(model, has_images) if model.model_path else None
    cuts, limit = "masked out", model.max_prompt_tokens
    if not model.enable_prompt_truncation:
        longest = model.max_model_len
        cuts, limit = "the run stops there", None if longest is None else longest - 1
    is_named = "prompt_key" in section.format.model_fields_set
    return DataSet(
        section.name,
        rows_of(section),
        TaskFormatter(section).check,
        TaskViewer(section, chat, limit, cuts),
        "tokens" if chat is not None else "characters",
        section.format.prompt_key if is_named and not has_images else "",
        "" if is_named else "Whole rows: -k prompt_key=<column> shows what is asked.",
    )


def _refuse_unknown_names(section: TasksetConfig) -> None:
    """A workflow is asked for its prompt, and makes its reward for that."""
    from trinity.common.rewards import REWARD_FUNCTIONS
    from trinity.common.workflows import WORKFLOWS

    try:
        WORKFLOWS.get(section.default_workflow_type or "simple_workflow")
        if section.default_reward_fn_type:
            REWARD_FUNCTIONS.get(section.default_reward_fn_type)
    except (UnknownNameError, ImportError) as error:
        raise UsageError(str(error)) from error


def _experiences(section: ExperienceBufferConfig, model: ModelConfig) -> DataSet:
    from trinity.common.models.loading import load_tokenizer

    if not model.model_path:
        raise UsageError("Give --model: what is trained on depends on its chat template.")
    tokenizer = _loaded(model, lambda: load_tokenizer(model.model_path, model.trust_remote_code))
    kind = FORMATTER.get(section.schema_type or "sft")
    formatter = kind(section.format, tokenizer, model.max_model_len)
    rows = rows_of_data_set(section)
    return DataSet(section.name, rows, formatter.format, ExperienceViewer(formatter), "tokens")


def _chat(model: ModelConfig, has_images: bool) -> Any:
    from trinity.common.models.chat import ChatFormat
    from trinity.common.models.settings import ModelSettings

    template = model.custom_chat_template
    if model.chat_template_path:
        template = Path(model.chat_template_path).read_text()
    chat = ChatFormat(
        ModelSettings(
            model_path=model.model_path,
            chat_template=template,
            enable_thinking=model.enable_thinking,
            trust_remote_code=model.trust_remote_code,
            enable_multimodal=has_images,
        )
    )
    _loaded(model, lambda: chat.tokenizer)
    if chat.vision is not None:
        _refuse_blind_model(chat.vision)
    return chat


def _loaded(model: ModelConfig, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [repr(error)]
        raise UsageError(
            f"No tokenizer can be loaded from {model.model_path!r}: {lines[0]}"
        ) from error


def _refuse_blind_model(vision: "Vision") -> None:
    try:
        _ = vision.num_tokens, vision.token_id
    except ValueError as error:
        raise UsageError(str(error)) from error
