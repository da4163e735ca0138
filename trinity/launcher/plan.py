"""`RunPlan`: what is so, where `Config` says what is wanted. Made once, before anything starts."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from trinity.common.config import Config, Derived, ModelConfig, derive
from trinity.common.config.arithmetic import rollouts_per_step
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import Mode, StorageType, SyncStyle
from trinity.common.errors import ConfigError, Problem
from trinity.launcher.gpu_needs import GpuNeeds, NotEnoughGpusError, gpu_needs
from trinity.launcher.hardware import cpu_cores, local_gpus
from trinity.launcher.job import JobFolder
from trinity.synchronizer.schedule import SyncSchedule
from trinity.utils.log import LOG_DIR_ENV, LOG_LEVEL_ENV, LOG_NODE_IP_ENV
from trinity.utils.plugins import PLUGIN_DIRS_ENV

_SLOTS_PER_PROCESS = 64
#: Environment of a process that computes, for glibc's malloc: what is freed is used again, and not
#: given back to the system to be mapped anew, at a page fault for each 4 KiB.
KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=2000000000"
    ":glibc.malloc.mmap_threshold=1000000000"
}


@dataclass(frozen=True)
class RunPlan:
    """One stage of a run with every fact settled.

    Args:
        config: The configuration, filled in.
        stage: Name of the stage; "" for a file without stages.
        job: Folder of the job (of this stage).
        gpus: Needed and found; all zero on CPUs.
        cores: Cores of this machine.
        num_runners: Processes that run workflows; ``slots`` workflows in each at once.
        schedule: When weights travel.
        notes: Values that were filled in, each with its reason.
        plugin_dirs: Folders of plugins.
    """

    config: Config
    stage: str
    job: JobFolder
    gpus: GpuNeeds
    cores: int
    num_runners: int
    slots: int
    schedule: SyncSchedule
    notes: Sequence[Derived] = ()
    plugin_dirs: tuple[str, ...] = ()
    env_vars: dict[str, str] = field(default_factory=dict)

    @property
    def namespace(self) -> str:
        """Where the actors of this run have their names."""
        return self.config.ray_namespace

    @property
    def device(self) -> str:
        """Device of trainer and embedded engine."""
        return "cuda" if self.gpus.total else "cpu"

    @property
    def is_colocated(self) -> bool:
        """Whether trainer and engines take turns on their GPUs."""
        return self.config.mode is Mode.COLOCATE and self.gpus.total > 0

    @property
    def num_ranks(self) -> int:
        """Processes of the trainer: one for each of its GPUs, or as many as the file asks for."""
        if self.is_colocated:
            return self.gpus.explorer
        return self.gpus.trainer or self.config.trainer.num_processes

    @property
    def compute_env(self) -> dict[str, str]:
        """Environment of engines and trainer.

        Threads that wait for each other spin for some microseconds, then sleep: spinning on would
        take the core from the part that works, as engine and trainer take turns.
        """
        threads = {
            "OMP_NUM_THREADS": str(self.cores),
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "20000",
        }
        kept = {} if self.gpus.total else KEPT_MEMORY
        return {**kept, **self.env_vars, **threads}

    def env_on(self, first: int, count: int) -> dict[str, str]:
        """`compute_env` of a process on ``count`` GPUs from the one numbered ``first``.

        Where trainer and engines share them: Ray would give a GPU to only one of the two.
        """
        if not self.is_colocated:
            return self.compute_env
        numbers = ",".join(map(str, range(self.gpus.total)))
        visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or numbers).split(",")
        own = ",".join(visible[first : first + count])
        return {**self.compute_env, "CUDA_VISIBLE_DEVICES": own}


def make_plan(
    config: Config,
    stage: str = "",
    plugin_dirs: Sequence[str] = (),
    found_gpus: int | None = None,
) -> RunPlan:
    """The plan of one stage.

    Args:
        config: As loaded; it is filled in here.
        found_gpus: GPUs of the cluster; None: those of this machine.

    Raises:
        NotEnoughGpusError: More GPUs are asked for than found.
    """
    config = with_homes(with_chat_template(config))
    filled, notes = derive(config)
    gpus = gpu_needs(filled, local_gpus() if found_gpus is None else found_gpus)
    if gpus.total > gpus.found:
        raise NotEnoughGpusError(gpus)
    cores = cpu_cores()
    slots = filled.explorer.runner_per_model * filled.explorer.rollout_model.engine_num
    processes = max(1, min(cores // 2, -(-slots // 8)), -(-slots // _SLOTS_PER_PROCESS))
    return RunPlan(
        config=filled,
        stage=stage,
        job=JobFolder(Path(filled.checkpoint_job_dir)),
        gpus=gpus,
        cores=cores,
        num_runners=processes,
        slots=-(-slots // processes),
        schedule=_schedule(filled),
        notes=notes,
        plugin_dirs=tuple(plugin_dirs),
        env_vars=_env_vars(filled, plugin_dirs),
    )


def with_homes(config: Config) -> Config:
    """``config`` with the `~` of its model folders written out."""
    copy = config.model_copy(deep=True)
    engines = [copy.explorer.rollout_model, *copy.explorer.auxiliary_models]
    models: list[ModelConfig | InferenceModelConfig] = [copy.model, *engines]
    for model in models:
        if model.model_path and model.model_path.startswith("~"):
            model.model_path = os.path.expanduser(model.model_path)
    if copy.model.critic_model_path.startswith("~"):
        copy.model.critic_model_path = os.path.expanduser(copy.model.critic_model_path)
    return copy


def with_chat_template(config: Config) -> Config:
    """``config`` with the text of `model.chat_template_path` as its chat template.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = config.model.chat_template_path
    if not path:
        return config
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        key = "model.chat_template_path"
        message = f"The chat template cannot be read: {error}."
        problem = Problem(key, message, "Correct the path.", path, config.source.line(key))
        raise ConfigError([problem], config.source.path) from error
    copy = config.model_copy(deep=True)
    copy.model.custom_chat_template = text
    return copy


def _schedule(config: Config) -> SyncSchedule:
    sync = config.synchronizer
    has_steps = config.mode.pairs and config.mode is not Mode.SERVE  # there a commit is a step
    rollouts = rollouts_per_step(config)
    is_counted = has_steps and rollouts > 0
    return SyncSchedule(
        SyncStyle.TRAINER_DRIVEN if writes_to_look_at(config) else sync.sync_style,
        sync.explorer_sync_interval or sync.sync_interval,
        sync.trainer_sync_interval or sync.sync_interval,
        sync.sync_offset,
        Fraction(config.samples_per_step, rollouts) if is_counted else Fraction(1),
        rows=config.samples_per_step if config.mode.explores else 0,
    )


def writes_to_look_at(config: Config) -> bool:
    """Whether no trainer will ever send weights: none reads a file that still grows."""
    output = config.buffer.trainer_input.experience_buffer
    is_file = output is not None and output.storage_type is StorageType.FILE
    return is_file and config.mode is Mode.EXPLORE


def _env_vars(config: Config, plugin_dirs: Sequence[str]) -> dict[str, str]:
    """Environment of every process of the run."""
    variables = {
        LOG_DIR_ENV: config.log.save_dir,
        LOG_LEVEL_ENV: str(config.log.level),
        PLUGIN_DIRS_ENV: ":".join(plugin_dirs),
    }
    if config.log.group_by_node:
        variables[LOG_NODE_IP_ENV] = "1"
    return variables


def rope_overrides(model: ModelConfig | InferenceModelConfig) -> dict[str, object]:
    """Fields of a model's config that replace its rotary embedding; trainer and engines agree."""
    given = {"rope_scaling": model.rope_scaling, "rope_theta": model.rope_theta}
    return {key: value for key, value in given.items() if value is not None}
