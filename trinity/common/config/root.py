"""The whole file: global settings, sections and stages."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr

from trinity.common.config.algorithm import AlgorithmConfig
from trinity.common.config.base import ConfigModel
from trinity.common.config.buffer import BufferConfig
from trinity.common.config.cluster import ClusterConfig
from trinity.common.config.data_processor import DataProcessorConfig
from trinity.common.config.explorer import ExplorerConfig
from trinity.common.config.log import LogConfig
from trinity.common.config.model import ModelConfig
from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.service import ServiceConfig
from trinity.common.config.synchronizer import SynchronizerConfig
from trinity.common.config.trainer import TrainerConfig
from trinity.common.constants import Mode
from trinity.utils.words import Span


@dataclass(frozen=True)
class Source:
    """Where a configuration came from, for messages that name a line. All sources are equal."""

    path: str = field(default="", compare=False)
    lines: dict[str, int] = field(default_factory=dict, compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def line(self, key: str) -> int | None:
        """Line of ``key``, or of the nearest section around it that the file has or an argument
        sets (`trinity.common.errors.ARGUMENT`)."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key)


class StageConfig(ConfigModel):
    """One of several runs in a row; what it leaves out it takes from the whole file."""

    stage_name: str = Field(min_length=1)
    """Name of the stage, unique in the file; added to the name of the experiment."""

    mode: Mode | None = None
    """Mode of this stage. Unset: the file's."""

    algorithm: AlgorithmConfig | None = None
    """Keys of `algorithm` for this stage; another `algorithm_type` brings its own defaults."""

    buffer: BufferConfig | None = None
    """Keys of `buffer` for this stage; a buffer or taskset replaces the file's whole."""

    data_processor: DataProcessorConfig | None = None
    """Keys of `data_processor` for this stage."""

    explorer: ExplorerConfig | None = None
    """Keys of `explorer` for this stage."""

    trainer: TrainerConfig | None = None
    """Keys of `trainer` for this stage."""


class Config(ConfigModel):
    """One run, as its YAML file describes it."""

    mode: Mode = Mode.BOTH
    """Which halves run: `both`, `train`, `explore`, `bench` (evaluate checkpoints), `serve`
    (an API over the model, which learns from what users reward), or `colocate` (both on the same
    GPUs)."""

    project: str = "Trinity-RFT"
    """Name of the project; a folder level of the job."""

    group: str = ""
    """Group of experiments; a folder level between project and name, left out if empty."""

    name: str = "rft"
    """Name of the experiment."""

    checkpoint_root_dir: str = ""
    """Root folder of all jobs. Empty: `TRINITY_CHECKPOINT_ROOT_DIR`, else `./checkpoints`."""

    checkpoint_job_dir: str = ""
    """Folder of this job. Empty: `<checkpoint_root_dir>/<project>[/<group>]/<name>`."""

    ray_namespace: str = ""
    """Namespace in which parts of a run find each other. Empty: `<project>[/<group>]/<name>`."""

    continue_from_checkpoint: bool = True
    """Go on from the newest checkpoint; false starts anew as `<name>_<timestamp>`."""

    ignore_validator_suggestions: bool = False
    """Show no advice on settings that would run but are probably not meant."""

    seed: int = 42
    """Seed of initial weights and of everything random that has no seed of its own."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimised and how fast."""

    data_processor: DataProcessorConfig = DataProcessorConfig()
    """What happens to tasks before and to experiences within a run."""

    model: ModelConfig = ModelConfig()
    """The model that is trained, its lengths and its sampling defaults."""

    cluster: ClusterConfig = ClusterConfig()
    """Which machines a run may use."""

    buffer: BufferConfig = BufferConfig()
    """Tasks in, experiences out, and how many of each make a step."""

    explorer: ExplorerConfig = ExplorerConfig()
    """The rollout loop, its runners and its models."""

    trainer: TrainerConfig = TrainerConfig()
    """What computes gradients, and what it saves."""

    monitor: MonitorConfig = MonitorConfig()
    """Where metrics go."""

    synchronizer: SynchronizerConfig = SynchronizerConfig()
    """How and how often new weights reach the explorer."""

    service: ServiceConfig = ServiceConfig()
    """Side services a run may use."""

    log: LogConfig = LogConfig()
    """The log files of a run's parts."""

    stages: list[StageConfig] = []
    """Several runs in a row, each starting from the model of the one before."""

    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """The file this came from; empty for one made in Python."""
        return self._source

    @property
    def samples_per_task(self) -> int:
        """Of an explorer step: what the tasksets say; where they differ, what `algorithm` says."""
        least, most = self.sample_span
        return int(most) if least == most else self.algorithm.repeat_times or 1

    @property
    def sample_span(self) -> Span:
        """Samples of a task of an explorer step: tasksets may say other numbers."""
        usual = self.algorithm.repeat_times or 1
        tasks = self.buffer.explorer_input
        tasksets = tasks.tasksets or ([tasks.taskset] if tasks.taskset else [])
        said = [taskset.repeat_times or usual for taskset in tasksets] or [usual]
        return Span(min(said), max(said))

    @property
    def samples_per_step(self) -> int:
        """Of all tasks of an explorer step."""
        return self.buffer.batch_size * self.samples_per_task

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this configuration as a YAML file that `load_config` reads back."""
        import yaml

        data = self.model_dump(mode="json")
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")

    def flatten(self) -> dict[str, Any]:
        """All leaves by dotted key; list items by their index."""
        flat: dict[str, Any] = {}
        _flatten("", self.model_dump(mode="json"), flat)
        return flat


def _flatten(prefix: str, value: Any, flat: dict[str, Any]) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        dotted = f"{prefix}{key}"
        if isinstance(item, dict | list) and item:
            _flatten(f"{dotted}.", item, flat)
        else:
            flat[dotted] = item
