"""The `data_processor:` section: what happens to tasks before and to experiences within a run."""

from typing import Any

from pydantic import Field

from trinity.common.config.base import ConfigModel
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig


class OperatorConfig(ConfigModel):
    """One step of a pipeline."""

    name: str
    """Operator by its registered name."""

    args: dict[str, Any] = {}
    """Arguments of the operator."""


class TaskPipelineConfig(ConfigModel):
    """Cleaning and scoring a raw data set once, before the run."""

    operators: list[OperatorConfig] = []
    """Data-Juicer operators, in order."""

    num_process: int = Field(4, ge=1)
    """Processes that work on the data."""

    config_path: str | None = None
    """Data-Juicer recipe to use instead of `operators`."""

    inputs: list[str] = []
    """Folders, files or hub names of the raw data."""

    output: TasksetConfig | None = None
    """Where the result goes. Unset: the first training taskset."""

    target_fields: list[str] = []
    """Columns that the result keeps."""

    priority_weights: dict[str, float] = {}
    """Weight of each score in the order of the result."""

    top_k: int = Field(-1, ge=-1)
    """Rows of the result that are kept; -1 keeps all."""


class ExperiencePipelineConfig(ConfigModel):
    """What happens to experiences between the explorer and the buffer."""

    operators: list[OperatorConfig] = []
    """Operators, in order; the algorithm's group advantage comes after them."""

    save_input: bool = True
    """Keep every experience as the explorer made it."""

    input_save_path: str | None = None
    """SQL database or jsonl file of them. Unset: `<job>/buffer/explorer_output.db`."""

    inputs: dict[str, ExperienceBufferConfig] = {}
    """Further sources of experiences by name, besides the explorer."""

    output: ExperienceBufferConfig | None = None
    """Where experiences go: another place to write `buffer.trainer_input.experience_buffer`."""


class DataProcessorConfig(ConfigModel):
    """What happens to tasks before and to experiences within a run."""

    task_pipeline: TaskPipelineConfig | None = None
    """Cleaning and scoring a raw data set once, before the run; null for none."""

    experience_pipeline: ExperiencePipelineConfig = ExperiencePipelineConfig()
    """What happens to experiences between the explorer and the buffer."""
