"""RunPlan -> the explorer: engines, runner processes, scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trinity.buffer import get_buffer_writer
from trinity.common.config import Config, InferenceModelConfig
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.constants import ConcurrentMode, EngineType, Mode, StorageType
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.protocol import InferenceEngine
from trinity.engine import make_engine
from trinity.engine.openai.settings import OpenAIEngineSettings
from trinity.engine.tinker.settings import TinkerEngineSettings
from trinity.engine.torch.settings import TorchEngineSettings
from trinity.engine.vllm.settings import VLLMEngineSettings
from trinity.explorer.benchmark import NoSink, NoTasks
from trinity.explorer.explorer import Explorer, ExplorerSettings, TaskSource
from trinity.explorer.pool import RunnerPool
from trinity.explorer.proxy.service import Service, ServiceSettings
from trinity.explorer.runner import RunnerSettings, WorkflowRunner
from trinity.explorer.scheduler import BatchSource, Scheduler, SchedulerSettings
from trinity.launcher.adapter import adapter_settings, named_adapters
from trinity.launcher.buffers import Buffers
from trinity.launcher.plan import RunPlan, engine_gpus, rope_overrides
from trinity.launcher.reporter import Reporter
from trinity.launcher.tinker import tinker_service
from trinity.synchronizer.board import Board
from trinity.utils import actor
from trinity.utils.log import get_logger
from trinity.utils.progress import Show

_WAITS_ALONE = "waiting for the weights of a trainer (mode train, in another terminal)"
_MAX_RESTARTS = 3  # of an engine that dies; one more death ends the run


@dataclass(frozen=True)
class Served:
    """One model as workflows see it: its engines, and how to talk to it."""

    engines: Sequence[InferenceEngine]
    settings: ModelSettings


def build(
    plan: RunPlan,
    board: Board,
    buffers: Buffers,
    reporter: Reporter,
    say: Callable[[str], None] = lambda text: None,
    show: Show = lambda text, is_to_stay: None,
) -> tuple[Explorer, list[InferenceEngine]]:
    """The explorer of a plan, and the engines of auxiliary models. Nothing is loaded yet.

    Args:
        say: Shows a line to the person at the screen.
        show: Shows what is under way there.
    """
    config = plan.config
    rollout = _serve(plan, config.explorer.rollout_model, f"{config.explorer.name}_rollout_model")
    auxiliary = [
        _serve(plan, model, f"{config.explorer.name}_auxiliary_{index}_model")
        for index, model in enumerate(config.explorer.auxiliary_models)
    ]
    scheduler: BatchSource
    tasks: TaskSource
    if config.mode is Mode.SERVE:
        scheduler = tasks = _service(plan, rollout, say)
    else:
        scheduler = Scheduler(_pool(plan, rollout, auxiliary, say), _scheduling(config))
        tasks = buffers.tasks or NoTasks()
    explorer = Explorer(
        engines=rollout.engines,
        scheduler=scheduler,
        tasks=tasks,
        sink=buffers.pipeline or NoSink(),
        board=board,
        schedule=plan.schedule,
        settings=_settings(plan),
        evals=buffers.evals,
        auxiliary=[engine for served in auxiliary for engine in served.engines],
        report=reporter.report,
        show=show,
        logger=get_logger(config.explorer.name),
    )
    return explorer, list(explorer.auxiliary)


def _service(plan: RunPlan, rollout: Served, say: Callable[[str], None]) -> Service:
    """The API of mode `serve`; its key is the user's, or made up and kept in the job's folder."""
    explorer = plan.config.explorer
    address = plan.job.path / f"{explorer.name}_server_url.txt"
    settings = ServiceSettings(
        explorer.listen_address,
        explorer.proxy_port,
        plan.job.serving_key(),
        address,
        explorer.service_status_check_interval,
        explorer.min_running_model_num,
        plan.config.seed,
    )
    log = get_buffer_writer(
        ExperienceBufferConfig(
            name="proxy_history", storage_type=StorageType.SQL, path=explorer.db_url
        )
    )
    model = replace(rollout.settings, enable_history=False)
    wrapper = ModelWrapper(list(rollout.engines), model, seed=plan.config.seed)
    return Service(wrapper, rollout.engines, settings, log, say)


def kill_engines(explorer: Explorer | None, auxiliary: Sequence[InferenceEngine]) -> None:
    """End the processes of all engines, whatever state they are in."""
    rollout = explorer.engines if explorer is not None else ()
    for engine in [*rollout, *auxiliary]:
        actor.kill(engine)


def _settings(plan: RunPlan) -> ExplorerSettings:
    config, explorer = plan.config, plan.config.explorer
    return ExplorerSettings(
        total_steps=config.buffer.total_steps,
        eval_interval=explorer.eval_interval,
        eval_on_startup=explorer.eval_on_startup,
        min_ratio=1 - explorer.over_rollout.ratio,
        wait_after_min_s=explorer.over_rollout.wait_after_min,
        sync_timeout_s=config.synchronizer.sync_timeout,
        detailed_stats=config.monitor.detailed_stats,
        metric_prefix="bench" if config.mode is Mode.BENCH else "eval",
        shares_gpus=plan.is_colocated,
        waits_for=ExplorerSettings.waits_for if config.mode.trains else _WAITS_ALONE,
    )


def _scheduling(config: Config) -> SchedulerSettings:
    explorer = config.explorer
    dynamic = explorer.dynamic_timeout
    return SchedulerSettings(
        max_timeout_s=explorer.max_timeout,
        max_retry_times=explorer.max_retry_times,
        dynamic_timeout_ratio=dynamic.ratio if dynamic.enable else None,
        warmup_min_steps=dynamic.warmup_min_steps,
        max_repeat_times_per_runner=explorer.max_repeat_times_per_runner,
        is_sequential=explorer.concurrent_mode is ConcurrentMode.SEQUENTIAL,
        return_partial_tasks=explorer.over_rollout.return_partial_tasks,
        seed=config.seed,
    )


def _pool(
    plan: RunPlan, rollout: Served, auxiliary: Sequence[Served], say: Callable[[str], None]
) -> RunnerPool:
    explorer = plan.config.explorer
    settings = RunnerSettings(
        num_threads=plan.slots,
        concurrent_mode=explorer.concurrent_mode.value,
        plugin_dirs=plan.plugin_dirs,
    )
    env_vars = {**plan.env_vars, "OMP_NUM_THREADS": "1", **explorer.env_vars}

    def make_runner(index: int, generation: int) -> WorkflowRunner:
        model = ModelWrapper(_nearest(rollout.engines, index), rollout.settings)
        others = [ModelWrapper(list(served.engines), served.settings) for served in auxiliary]
        return actor.spawn(
            WorkflowRunner,
            index,
            model,
            others,
            settings,
            name=f"{explorer.name}_runner_{index}_{generation}",
            namespace=plan.namespace,
            env_vars=env_vars,
        )

    return RunnerPool(
        make_runner,
        plan.num_runners,
        plan.slots,
        start_concurrency=explorer.runner_prepare_concurrency,
        start_retries=explorer.runner_prepare_max_retries,
        report_interval_s=explorer.runner_state_report_interval,
        say=say,
    )


def _nearest(engines: Sequence[InferenceEngine], index: int) -> list[InferenceEngine]:
    """All engines, the ``index``-th first: runners begin with different ones."""
    start = index % len(engines)
    return [*engines[start:], *engines[:start]]


def _serve(plan: RunPlan, model: InferenceModelConfig, name: str) -> Served:
    engines = [
        _spawn_engine(plan, model, index, f"{name}_{index}") for index in range(model.engine_num)
    ]
    return Served(engines, model_settings(plan.config, model))


def torch_settings(
    config: Config, model: InferenceModelConfig, cores: int, device: str
) -> TorchEngineSettings:
    """What the embedded engine is told of a model."""
    return TorchEngineSettings(
        model_path=model.model_path or config.model.model_path,
        dtype=model.dtype,
        seed=model.seed,
        init_seed=config.seed,
        max_model_len=model.max_model_len,
        num_threads=cores,
        enable_prefix_caching=model.enable_prefix_caching,
        update_mode=model.update_mode,
        device=device,
        trust_remote_code=model.trust_remote_code,
        config_overrides=rope_overrides(model),
        adapter=adapter_settings(config) if model.enable_lora else None,
        named_adapters=named_adapters(model),
        loads_adapters=model.enable_runtime_lora_updating,
    )


def _openai_settings(config: Config, model: InferenceModelConfig) -> OpenAIEngineSettings:
    service = model.external_model_config
    return OpenAIEngineSettings(
        model=service.model_name or model.model_path or config.model.model_path,
        base_url_env=service.base_url_env,
        api_key_env=service.api_key_env,
        max_retries=service.max_retries,
        max_requests_per_minute=service.max_requests_per_minute,
        max_concurrent=service.max_concurrent_requests,
    )


def tinker_settings(config: Config, model: InferenceModelConfig) -> TinkerEngineSettings:
    """What an engine at the Tinker service is told of a model."""
    path = model.model_path or config.model.model_path
    is_trained = model is config.explorer.rollout_model
    return TinkerEngineSettings(
        tinker_service(config, None if is_trained else path),
        tokenizer_path=path,
        max_model_len=model.max_model_len,
        seed=model.seed,
        keeps_temperature=is_trained and config.mode is Mode.SERVE,
    )


def _engine_of(plan: RunPlan, model: InferenceModelConfig) -> tuple[str, object]:
    """Type and settings of the engine that a model runs on."""
    if model.engine_type is EngineType.OPENAI:
        settings: object = _openai_settings(plan.config, model)
    elif model.engine_type is EngineType.VLLM:
        settings = _vllm_settings(plan, model)
    elif model.engine_type is EngineType.TINKER:
        settings = tinker_settings(plan.config, model)
    else:
        settings = torch_settings(plan.config, model, plan.cores, plan.device)
    return str(model.engine_type), settings


def _vllm_settings(plan: RunPlan, model: InferenceModelConfig) -> VLLMEngineSettings:
    names = (
        "dtype",
        "seed",
        "max_model_len",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
        "gpu_memory_utilization",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "update_mode",
        "enable_log_requests",
        "trust_remote_code",
        "extra_engine_args",
    )
    return VLLMEngineSettings(
        model_path=model.model_path or plan.config.model.model_path,
        init_seed=plan.config.seed,
        sleeps=plan.is_colocated,
        keeps_seeds=plan.gpus.total == 0,  # a draw for each request would take most of a GPU's time
        config_overrides=rope_overrides(model),
        adapter=adapter_settings(plan.config) if model.enable_lora else None,
        max_cpu_loras=plan.config.model.max_cpu_loras,
        fully_sharded_loras=plan.config.model.fully_sharded_loras,
        named_adapters=named_adapters(model),
        loads_adapters=model.enable_runtime_lora_updating,
        lora_kwargs=model.lora_kwargs,
        **{name: getattr(model, name) for name in names},
    )


def _spawn_engine(
    plan: RunPlan, model: InferenceModelConfig, index: int, name: str
) -> InferenceEngine:
    """The engine in a process of its own, with the OpenAI API beside it if that is asked for."""
    kind, settings = _engine_of(plan, model)
    num_gpus = engine_gpus(model) if plan.gpus.total and not plan.is_colocated else 0
    env_vars = plan.env_on(index * engine_gpus(model), engine_gpus(model))
    asks_for_api = model is plan.config.explorer.rollout_model and model.enable_openai_api
    make: Callable[[], InferenceEngine] = partial(make_engine, kind, settings)
    if model.base_port is not None or asks_for_api:
        from trinity.engine.served import ServedEngine

        make = partial(
            ServedEngine,
            make,
            model_settings(plan.config, model),
            port=0 if model.base_port is None else model.base_port + index,
            api_key=None if model.api_key == "EMPTY" else model.api_key,
        )
    return actor.spawn(
        make,
        name=name,
        namespace=plan.namespace,
        num_gpus=num_gpus,
        env_vars=env_vars,
        max_restarts=_MAX_RESTARTS,
    )


def model_settings(config: Config, model: InferenceModelConfig) -> ModelSettings:
    """What a wrapper is told of a model."""
    names = (
        "temperature",
        "top_p",
        "top_k",
        "max_model_len",
        "max_prompt_tokens",
        "max_response_tokens",
        "min_response_tokens",
        "enable_prompt_truncation",
        "repetition_penalty",
        "chat_template",
        "enable_thinking",
        "enable_multimodal",
        "enable_history",
        "ignore_eos",
        "enable_openai_api",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "reasoning_parser",
        "trust_remote_code",
    )
    given = {name: getattr(model, name) for name in names}
    path = model.model_path or config.model.model_path
    adapter = adapter_settings(config) if model.enable_lora else None
    return ModelSettings(
        model_path=path,
        name=model.name or path,
        gives_tokens=model.engine_type is not EngineType.OPENAI,
        adapter=None if adapter is None else adapter.name,
        has_named_adapters=bool(model.lora_modules) or model.enable_runtime_lora_updating,
        loads_adapters=model.enable_runtime_lora_updating,
        **{name: value for name, value in given.items() if value is not None},
    )
