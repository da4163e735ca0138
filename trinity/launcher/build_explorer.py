"""RunPlan -> the explorer: runner processes, scheduler, and engines by `build_engine`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from trinity.buffer import get_buffer_writer
from trinity.common.config import Config
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.config.derive import spec_of
from trinity.common.constants import ConcurrentMode, Mode, StorageType
from trinity.common.models import ModelWrapper
from trinity.common.models.auxiliary import AuxiliaryClients
from trinity.common.models.protocol import InferenceEngine
from trinity.explorer.benchmark import NoSink, NoTasks
from trinity.explorer.explorer import Explorer, ExplorerSettings, TaskSource
from trinity.explorer.pool import RunnerPool
from trinity.explorer.proxy.service import Service, ServiceSettings
from trinity.explorer.runner import RunnerSettings, WorkflowRunner
from trinity.explorer.scheduler import BatchSource, Scheduler, SchedulerSettings
from trinity.launcher.buffers import Buffers
from trinity.launcher.build_engine import Served, serve
from trinity.launcher.plan import RunPlan, writes_to_look_at
from trinity.launcher.reporter import Reporter
from trinity.synchronizer.board import Board
from trinity.utils import actor
from trinity.utils.log import get_logger
from trinity.utils.progress import Show

_WAITS_ALONE = "waiting for the weights of a trainer (mode train, in another terminal)"


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
    rollout = serve(plan, config.explorer.rollout_model, f"{config.explorer.name}_rollout_model")
    auxiliary = [
        serve(plan, model, f"{config.explorer.name}_auxiliary_{index}_model")
        for index, model in enumerate(config.explorer.auxiliary_models)
    ]
    if buffers.pipeline is not None:
        buffers.pipeline.set_auxiliary_models(AuxiliaryClients(_models(auxiliary)))
    scheduler: BatchSource
    tasks: TaskSource
    if config.mode is Mode.SERVE:
        scheduler = tasks = _service(plan, rollout, say)
    else:
        scheduler = Scheduler(_pool(plan, rollout, auxiliary, say), scheduling(config))
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
        has_trainer=not writes_to_look_at(config),
        waits_for=ExplorerSettings.waits_for if config.mode.trains else _WAITS_ALONE,
    )


def scheduling(config: Config) -> SchedulerSettings:
    """How the scheduler of a filled-in ``config`` goes about its tasks."""
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
        min_group_size=_min_group_size(config),
        seed=config.seed,
    )


def _min_group_size(config: Config) -> int:
    """Runs without which a task's samples say nothing: of advantages by the group, two."""
    spec = spec_of(config)
    is_usual = config.algorithm.advantage_fn in (None, "none", spec.advantage_fn)
    return spec.min_repeat_times if is_usual else SchedulerSettings.min_group_size


def _pool(
    plan: RunPlan, rollout: Served, auxiliary: Sequence[Served], say: Callable[[str], None]
) -> RunnerPool:
    explorer = plan.config.explorer
    settings = RunnerSettings(
        concurrent_mode=explorer.concurrent_mode.value,
        plugin_dirs=plan.plugin_dirs,
        log_name=f"{explorer.name}_runner",
    )
    env_vars = {**plan.env_vars, "OMP_NUM_THREADS": "1", **explorer.env_vars}

    def make_runner(index: int, generation: int) -> WorkflowRunner:
        model = ModelWrapper(_nearest(rollout.engines, index), rollout.settings)
        others = _models(auxiliary)
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
        logger=get_logger(explorer.name),
    )


def _models(served: Sequence[Served]) -> list[ModelWrapper]:
    return [ModelWrapper(list(one.engines), one.settings) for one in served]


def _nearest(engines: Sequence[InferenceEngine], index: int) -> list[InferenceEngine]:
    """All engines, the ``index``-th first: runners begin with different ones."""
    start = index % len(engines)
    return [*engines[start:], *engines[:start]]
