"""Checks of `model:` and of the models of `explorer:`."""

from __future__ import annotations

from collections.abc import Iterator

from trinity.common.config.case import Case, Check
from trinity.common.config.check_adapters import ADAPTER_CHECKS, models_of
from trinity.common.config.derive import needs_critic
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType, Mode
from trinity.common.errors import Problem

_PARALLEL = ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "nnodes")


def _path(case: Case) -> Iterator[Problem]:
    model = case.config.model
    if not model.model_path and not model.external_model.enable:
        message = "No model is named."
        fix = "Add `model_path: /path/to/model`, or a hub name, below `model`."
        yield Problem("model.model_path", message, fix)


def _lengths(case: Case) -> Iterator[Problem]:
    model = case.config.model
    if not model.external_model.enable:
        yield from _limits(case, "model")
    for key in models_of(case):
        if key != "explorer.rollout_model" or _has_own_length(case, key):
            yield from _limits(case, key)


def _has_own_length(case: Case, key: str) -> bool:
    names = ("max_model_len", "max_prompt_tokens", "max_response_tokens", "min_response_tokens")
    return any(case.is_set(f"{key}.{name}") for name in names)


def _limits(case: Case, key: str) -> Iterator[Problem]:
    model = case.config.model if key == "model" else models_of(case)[key]
    total, prompt, response = (
        model.max_model_len,
        model.max_prompt_tokens,
        model.max_response_tokens,
    )
    if total is None:
        message = "The longest sequence cannot be told."
        fix = "Set it, or both `max_prompt_tokens` and `max_response_tokens`."
        yield Problem(f"{key}.max_model_len", message, fix)
        return
    if (prompt or 0) + (response or 0) > total:
        yield _too_long(case, key, total, prompt or 0, response or 0)
    least = model.min_response_tokens or 0
    if response and least >= response:
        message = f"A response is at most {response} tokens long ({key}.max_response_tokens)."
        fix = f"Set it to {response - 1} or less."
        yield case.problem(f"{key}.min_response_tokens", message, fix)


def _too_long(case: Case, key: str, total: int, prompt: int, response: int) -> Problem:
    """The two parts of a sequence are longer than it; one that was worked out is not held up."""
    lengths = {"prompt": prompt, "response": response}
    given = [part for part in lengths if case.is_set(f"{key}.max_{part}_tokens")]
    if len(given) == 1:
        [part] = given
        message = f"A {part} of {lengths[part]} tokens ({key}.max_{part}_tokens) leaves no room"
        other = "response" if part == "prompt" else "prompt"
        message = f"{message} in {total} for a {other}."
        fix = f"Set `max_model_len` above {lengths[part]}, or `max_{part}_tokens` below {total}."
    else:
        message = (
            f"A prompt of {prompt} tokens ({key}.max_prompt_tokens) and a response of {response} "
            f"({key}.max_response_tokens) are longer than {total}."
        )
        fix = f"Set `max_model_len` to {prompt + response}, or lower the two."
    return case.problem(f"{key}.max_model_len", message, fix)


def _external(case: Case) -> Iterator[Problem]:
    external = case.config.model.external_model
    if not external.enable:
        return
    if case.config.mode is not Mode.BENCH:
        message = f"A model behind a service can be evaluated only, but mode is {case.config.mode}."
        yield case.problem("model.external_model.enable", message, "Set `mode: bench`.")
    if not external.model_name:
        message = "The service needs the name of the model."
        fix = "Add `model_name: ...` below `model.external_model`."
        yield Problem("model.external_model.model_name", message, fix)


def _engines(case: Case) -> Iterator[Problem]:
    for key, model in models_of(case).items():
        if model.engine_type is EngineType.TORCH:
            yield from _embedded(case, key, model)
        if not model.use_v1:
            message = "vLLM has no V0 engine any more."
            yield case.problem(f"{key}.use_v1", message, "Remove it.")
        if model.enable_auto_tool_choice and not model.tool_call_parser:
            message = "`enable_auto_tool_choice` needs to know how tool calls look."
            fix = "Add `tool_call_parser: hermes`, or that of your model."
            yield Problem(f"{key}.tool_call_parser", message, fix)


def _embedded(case: Case, key: str, model: InferenceModelConfig) -> Iterator[Problem]:
    for name in _PARALLEL:
        if getattr(model, name) > 1:
            message = "The embedded engine (`engine_type: torch`) runs on one device."
            fix = "Use `engine_num` for several, or `engine_type: vllm`."
            yield case.problem(f"{key}.{name}", message, fix)


def _images(case: Case) -> Iterator[Problem]:
    """Which parts see images: the embedded engine, services, and the trainer on PyTorch."""
    for key, model in models_of(case).items():
        if not model.enable_multimodal:
            continue
        if model.engine_type not in (EngineType.TORCH, EngineType.OPENAI):
            message = f"The engine `{model.engine_type}` is given no images yet."
            fix = "Remove it, or set `engine_type: torch`."
            yield case.problem(f"{key}.enable_multimodal", message, fix)
    config = case.config
    is_trained = config.mode.trains and config.explorer.rollout_model.enable_multimodal
    key = "explorer.rollout_model.enable_multimodal"
    if is_trained and needs_critic(config):
        message = "A critic reads texts only."
        fix = "Remove it, or take an algorithm without a critic, such as `grpo`."
        yield case.problem(key, message, fix)
    if is_trained and config.trainer.trainer_type != "torch":
        message = f"`trainer_type: {config.trainer.trainer_type}` trains on texts only."
        yield case.problem(key, message, "Remove it, or set `trainer.trainer_type: torch`.")


def _rollout_engine(case: Case) -> Iterator[Problem]:
    engine = case.config.explorer.rollout_model.engine_type
    key = "explorer.rollout_model.engine_type"
    if engine is EngineType.OPENAI and case.config.mode.pairs:
        message = "An outside service cannot be trained: it takes no weights."
        fix = "Use `vllm` or `torch`; services serve in mode `bench` and as auxiliary models."
        yield case.problem(key, message, fix)


def _auxiliary(case: Case) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, model in enumerate(case.config.explorer.auxiliary_models):
        key = f"explorer.auxiliary_models.{index}"
        if not model.model_path:
            if model.engine_type is EngineType.OPENAI and model.external_model_config.model_name:
                continue
            fix = "Add `model_path: ...` to it."
            yield Problem(f"{key}.model_path", "An auxiliary model needs its own path.", fix)
        elif model.name in seen:
            message = f"Two auxiliary models are called {model.name!r}."
            yield case.problem(f"{key}.name", message, "Give one of them another `name`.")
        seen.add(model.name or "")


def _min_running(case: Case) -> Iterator[Problem]:
    explorer = case.config.explorer
    engines = explorer.rollout_model.engine_num
    if case.config.mode is Mode.SERVE and explorer.min_running_model_num > engines:
        key = "explorer.min_running_model_num"
        message = f"There are {engines} engines (explorer.rollout_model.engine_num)."
        yield case.problem(key, message, f"Set it to {engines} or less.")


MODEL_CHECKS: tuple[Check, ...] = (
    _path,
    _lengths,
    *ADAPTER_CHECKS,
    _external,
    _engines,
    _images,
    _rollout_engine,
    _auxiliary,
    _min_running,
)
