"""The `explorer:` section: the rollout loop, its runners and its models."""

from pydantic import Field

from trinity.common.config.base import ConfigModel
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import ConcurrentMode


class OverRolloutConfig(ConfigModel):
    """Going on without the slowest tasks of a step."""

    ratio: float = Field(0.0, ge=0, lt=1)
    """Share of a step's tasks that is not waited for; 0 waits for all."""

    wait_after_min: float = Field(30.0, ge=0)
    """Seconds more that the stragglers get once enough tasks are done."""

    return_partial_tasks: bool = False
    """Keep the finished runs of tasks that are given up."""


class DynamicTimeoutConfig(ConfigModel):
    """A deadline that follows how long successful tasks take."""

    enable: bool = False
    """Use it instead of `max_timeout` alone."""

    warmup_min_steps: int = Field(1, ge=0)
    """First explorer steps that keep to `max_timeout`."""

    ratio: float = Field(3.0, gt=0)
    """Deadline as a multiple of the mean time of successful tasks."""


class ExplorerConfig(ConfigModel):
    """The rollout loop, its runners and its models."""

    name: str = "explorer"
    """Name of the explorer; its logs, its runners and its engines carry it."""

    runner_per_model: int = Field(8, ge=1)
    """Workflows that run side by side for each engine."""

    runner_prepare_concurrency: int = Field(8, ge=1)
    """Runner processes that start at the same time."""

    runner_prepare_max_retries: int = Field(2, ge=0)
    """Further attempts to start a runner process."""

    max_timeout: float = Field(1800, gt=0)
    """Seconds one attempt at a task may take."""

    max_retry_times: int = Field(2, ge=0)
    """Further attempts at a task that failed or took too long."""

    env_vars: dict[str, str] = {}
    """Environment variables of the runner processes."""

    concurrent_mode: ConcurrentMode = ConcurrentMode.SEQUENTIAL
    """How the repeats of one task run on their runner: `sequential`, `asynchronous` or
    `multi-threading`."""

    max_repeat_times_per_runner: int | None = Field(None, ge=1)
    """Repeats of a task that one runner takes; more go to other runners. Unset: all."""

    rollout_model: InferenceModelConfig = InferenceModelConfig()
    """The engines of the model that is trained."""

    auxiliary_models: list[InferenceModelConfig] = []
    """Other models that workflows may ask, such as judges and teachers."""

    eval_interval: int = Field(100, ge=1)
    """Explorer steps between two evaluations; rounded down to a multiple of the sync interval."""

    eval_on_startup: bool = True
    """Evaluate the model before the first step; not after a resume."""

    bench_on_latest_checkpoint: bool = False
    """In mode `bench`, evaluate the newest checkpoint only."""

    over_rollout: OverRolloutConfig = OverRolloutConfig()
    """Going on without the slowest tasks of a step."""

    dynamic_timeout: DynamicTimeoutConfig = DynamicTimeoutConfig()
    """A deadline that follows how long successful tasks take."""

    runner_state_report_interval: float = Field(0, ge=0)
    """Seconds between two reports of what the runners do; 0 for none."""

    max_inflight_batches: int = Field(2, ge=1)
    """Batches under way at once with `sync_style: fully_async`, of earlier releases. Here it is one
    at a time: any value but 2 is refused."""

    proxy_port: int = Field(8010, ge=1, le=65535)
    """TCP port of the API in mode `serve`."""

    listen_address: str = "127.0.0.1"
    """Address the API listens on; `0.0.0.0` opens it to the network."""

    service_status_check_interval: float = Field(60, gt=0)
    """Seconds between two health checks of the engines in mode `serve`."""

    min_running_model_num: int = Field(1, ge=1)
    """Engines that must be healthy for mode `serve` to go on."""

    db_url: str | None = None
    """SQL database that records the replies of mode `serve` (table `proxy_history`). Unset: a
    SQLite file in the job."""
