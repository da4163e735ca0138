"""Facts that must hold before a run starts: folders, tokenizers, columns, ports, packages.

What can be seen in the file alone is `trinity.common.config`'s; here the disk and the machine are
asked. Nothing is written and nothing is started.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from trinity.buffer import check_experience_buffer, check_taskset
from trinity.buffer.first_step import first_step_problems
from trinity.common.config import Config, TasksetConfig
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.unread import find_unread
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.common.errors import Problem
from trinity.common.workflows import check_workflow
from trinity.engine.tinker.settings import KEY_VARIABLES, has_key
from trinity.launcher.check_chat import chat_problems
from trinity.launcher.hardware import OWN_CLUSTER, asked_cluster, is_port_free
from trinity.launcher.job import writable_problem
from trinity.utils.hub import hub_problem
from trinity.utils.monitor import check_monitor_args

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
_READ_AS_JSON = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
_PACKAGES = {
    EngineType.VLLM: ("vllm", "vllm"),
    EngineType.OPENAI: ("httpx", "api"),
    EngineType.TINKER: ("tinker", "tinker"),
    TrainerType.VERL: ("verl", "verl"),
    TrainerType.TINKER: ("tinker", "tinker"),
}

_HOMES = {
    EngineType.VLLM: "trinity.engine.vllm",
    EngineType.OPENAI: "trinity.engine.openai",
    EngineType.TINKER: "trinity.engine.tinker",
    TrainerType.VERL: "trinity.trainer.backends.verl",
    TrainerType.TINKER: "trinity.trainer.backends.tinker",
}
"""Kind -> the package of ours that drives it."""


def find_start_problems(config: Config) -> list[Problem]:
    """All that would stop a run with this (derived) configuration, each with key and line."""
    found = [
        *find_unread(config),
        *_package_problems(config),
        *_key_problems(config),
        *_variable_problems(config),
        *_unbuilt_problems(config),
        *_model_problems(config),
        *chat_problems(config),
        *_adapter_problems(config),
        *_data_problems(config),
        *first_step_problems(config),
        *_place_problems(config),
    ]
    return [located(problem, config) for problem in found]


def located(problem: Problem, config: Config) -> Problem:
    """``problem`` with the line of its key."""
    line = problem.line or config.source.line(problem.key)
    return Problem(problem.key, problem.message, problem.fix, problem.value, line)


def _engines(config: Config) -> list[tuple[str, InferenceModelConfig]]:
    explorer = config.explorer
    models = [("explorer.rollout_model", explorer.rollout_model)]
    return models + [
        (f"explorer.auxiliary_models.{i}", model)
        for i, model in enumerate(explorer.auxiliary_models)
    ]


def _package_problems(config: Config) -> Iterator[Problem]:
    asked: list[tuple[str, EngineType | TrainerType]] = []
    if config.mode.explores:
        asked += [(f"{key}.engine_type", model.engine_type) for key, model in _engines(config)]
    if config.mode.trains:
        asked.append(("trainer.trainer_type", config.trainer.trainer_type))
    for key, kind in asked:
        home = _HOMES.get(kind)
        if home and importlib.util.find_spec(home) is None:
            message = f"This version of trinity has no {kind!s} here yet."
            yield Problem(key, message, "Use `torch`, or run with --cpu.", str(kind))
            continue
        package, extra = _PACKAGES.get(kind, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            fix = f"Install it with pip install 'trinity-rft[{extra}]'"
            if kind not in (EngineType.TINKER, TrainerType.TINKER):
                fix += ", or run with --cpu to use the built-in engine and trainer"
            message = f"The package {package!r} is not installed."
            yield Problem(key, message, f"{fix}.", str(kind))


def _key_problems(config: Config) -> Iterator[Problem]:
    """The Tinker service asks for a key, which is looked for where its own program looks too."""
    models = [model for _, model in _engines(config)] if config.mode.explores else []
    engines = {model.engine_type for model in models}
    trains = config.mode.trains and config.trainer.trainer_type is TrainerType.TINKER
    if not trains and EngineType.TINKER not in engines:
        return
    path = config.model.model_path
    if trains and config.model.tinker.base_model is None and is_local_path(path):
        message = "The Tinker service does not know the folder of `model.model_path`."
        fix = "Add `base_model: owner/name`, as the service calls the model."
        yield Problem("model.tinker.base_model", message, fix)
    if not has_key():
        names = " nor ".join(KEY_VARIABLES)
        message = f"The Tinker service needs a key, and neither {names} is set."
        yield Problem("model.tinker.enable", message, f"export {KEY_VARIABLES[0]}=tml-...")


def _variable_problems(config: Config) -> Iterator[Problem]:
    """Address and key of outside models. A cluster that is joined may have them where it runs."""
    from trinity.launcher.cluster import running_cluster  # it brings Ray

    asked = [
        (f"{key}.external_model_config.{name}", getattr(model.external_model_config, name))
        for key, model in (_engines(config) if config.mode.explores else [])
        if model.engine_type is EngineType.OPENAI
        for name in ("base_url_env", "api_key_env")
    ]
    absent = [(key, variable) for key, variable in asked if not os.environ.get(variable)]
    is_joined = asked_cluster(config.cluster.ray_address) not in (None, OWN_CLUSTER)
    if not absent or is_joined or running_cluster() is not None:
        return
    for key, variable in absent:
        message = f"The environment variable {variable} is not set: an outside model needs it."
        yield Problem(key, message, f"export {variable}=...", variable)


def _unbuilt_problems(config: Config) -> Iterator[Problem]:
    """What a configuration may ask for and this version can't do yet."""
    if config.mode is Mode.SERVE and config.buffer.explorer_input.eval_tasksets:
        yield Problem(
            "buffer.explorer_input.eval_tasksets",
            "Mode serve runs no evaluations.",
            "Remove them, and evaluate the checkpoints with `mode: bench`.",
        )
    rollout = config.explorer.rollout_model
    serves = config.mode.explores and (rollout.enable_openai_api or rollout.base_port)
    if serves and importlib.util.find_spec("fastapi") is None:
        yield Problem(
            "explorer.rollout_model.enable_openai_api",
            "The package 'fastapi' is not installed.",
            "Install it with pip install 'trinity-rft[api]'.",
        )


def _model_problems(config: Config) -> Iterator[Problem]:
    engine = config.explorer.rollout_model.engine_type
    is_loaded = config.mode.trains or engine is not EngineType.OPENAI
    wanted = [("model.model_path", config.model.model_path)] if is_loaded else []
    if config.model.critic_model_path:
        wanted.append(("model.critic_model_path", config.model.critic_model_path))
    if config.mode.explores:
        for key, model in _engines(config)[1:]:
            if model.engine_type is not EngineType.OPENAI:
                wanted.append((f"{key}.model_path", model.model_path or ""))
    seen: set[str] = set()
    for key, path in wanted:
        if path not in seen and config.model.model_path:
            seen.add(path)
            yield from _model_folder_problems(key, path, config.model.tinker.enable)
            if not is_local_path(path):
                message = hub_problem(path, "model")
                if message:
                    fix = "Correct the name, or give the folder of a model."
                    yield Problem(key, message, fix, path)


def _adapter_problems(config: Config) -> Iterator[Problem]:
    with_adapters = [entry for entry in _engines(config) if entry[1].lora_modules]
    if not with_adapters or not config.mode.explores:
        return
    from trinity.launcher.adapter import named_adapter_problems

    for key, model in with_adapters:
        yield from named_adapter_problems(key, model)


def _model_folder_problems(key: str, path: str, is_tokenizer: bool) -> Iterator[Problem]:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if is_local_path(path):
            fix = "Correct the path, or give the name of a model on the hub."
            yield Problem(key, "There is no such folder.", fix, path)
        return
    if not (folder / "config.json").is_file() and not is_tokenizer:
        yield Problem(
            key,
            "The folder has no config.json.",
            "Point to a Hugging Face model folder; convert a checkpoint with `trinity convert`.",
            path,
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield Problem(
            key,
            "The folder has no tokenizer (no tokenizer.json, tokenizer.model or vocab file).",
            "Copy the tokenizer files of the base model into it.",
            path,
        )
    for name in _READ_AS_JSON:
        if (folder / name).is_file() and (trouble := _json_trouble(folder / name)):
            fix = "Copy the file anew; a download may have been cut."
            yield Problem(key, f"Its {name} can't be read: {trouble}.", fix, path)


def _json_trouble(file: Path) -> str | None:
    try:
        json.loads(file.read_bytes())
    except UnicodeDecodeError:
        return "it is no text"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def is_local_path(path: str) -> bool:
    """Whether ``path`` can only mean a folder, not a name on a hub (``owner/model``)."""
    return path.startswith(("/", ".", "~")) or path.count("/") != 1 or Path(path).exists()


def _data_problems(config: Config) -> Iterator[Problem]:
    tasks = config.buffer.explorer_input
    if config.mode.explores:
        if config.mode is not Mode.BENCH:
            for index, taskset in enumerate(tasks.tasksets):
                key = f"buffer.explorer_input.tasksets.{index}"
                if "buffer.explorer_input.taskset" in config.source.lines:
                    key = "buffer.explorer_input.taskset"
                found = [] if _is_made_first(config, taskset) else check_taskset(taskset)
                yield from _renamed([*found, *check_workflow(taskset)], key)
        for index, taskset in enumerate(tasks.eval_tasksets):
            key = f"buffer.explorer_input.eval_tasksets.{index}"
            yield from _renamed([*check_taskset(taskset), *check_workflow(taskset)], key)
    if config.mode.trains:
        inputs = config.buffer.trainer_input
        if inputs.experience_buffer is not None:
            key = "buffer.trainer_input.experience_buffer"
            yield from _renamed(check_experience_buffer(inputs.experience_buffer), key)
        for name, buffer in inputs.auxiliary_buffers.items():
            key = f"buffer.trainer_input.auxiliary_buffers.{name}"
            yield from _renamed(check_experience_buffer(buffer), key)


def _is_made_first(config: Config, taskset: TasksetConfig) -> bool:
    """Whether the task pipeline makes this taskset, so that it need not be there yet."""
    pipeline = config.data_processor.task_pipeline
    output = pipeline.output if pipeline is not None else None
    return output is not None and output.path == taskset.path


def _renamed(problems: list[Problem], prefix: str) -> Iterator[Problem]:
    for problem in problems:
        key = f"{prefix}.{problem.key}" if problem.key else prefix
        yield Problem(key, problem.message, problem.fix, problem.value)


def _place_problems(config: Config) -> Iterator[Problem]:
    problem = writable_problem(Path(config.checkpoint_root_dir))
    if problem:
        message, _, fix = problem.partition(": ")
        yield Problem("checkpoint_root_dir", message + ".", fix[:1].upper() + fix[1:])
    trouble = check_monitor_args(config.monitor.monitor_type, config.monitor.monitor_args)
    if trouble:
        message, _, fix = trouble.partition(": ")
        yield Problem("monitor.monitor_type", message + ".", fix)
    for key, port in _ports(config):
        if not is_port_free(port):
            yield Problem(
                key, f"Port {port} is in use by another process.", "Name a free port.", port
            )


def _ports(config: Config) -> Iterator[tuple[str, int]]:
    if config.mode.explores:
        for key, model in _engines(config):
            serves = model.enable_openai_api or key != "explorer.rollout_model"
            if model.base_port is not None and serves:
                for index in range(model.engine_num):
                    yield f"{key}.base_port", model.base_port + index
    if config.mode is Mode.SERVE:
        yield "explorer.proxy_port", config.explorer.proxy_port
    service = config.service.data_juicer
    if service is not None and service.auto_start and service.port:
        yield "service.data_juicer.port", service.port
