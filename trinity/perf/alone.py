"""A configuration of any run -> one whose explorer runs alone, to be measured."""

from __future__ import annotations

from pathlib import Path

from trinity.common.config import Config, iterate_stages
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.config.log import LogConfig
from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.synchronizer import SynchronizerConfig
from trinity.common.constants import Mode, StorageType, SyncMethod, SyncStyle
from trinity.common.errors import TrinityError

_MODES = (Mode.EXPLORE, Mode.BOTH, Mode.COLOCATE)


class NothingToMeasureError(TrinityError):
    """The file has no explorer that works on tasks of its own."""

    exit_code = 2


def explorer_alone(config: Config, root: Path, total_steps: int) -> Config:
    """The last stage of ``config`` that explores, without trainer, evaluation and resume.

    Its job lies below ``root``, and so does all that it writes; the user's own job, database and
    weights are left alone. The engines keep the weights they start with.

    Raises:
        NothingToMeasureError: No stage explores.
    """
    stages = [stage for _, stage in iterate_stages(config)]
    found = [stage for stage in stages if stage.mode in _MODES]
    if not found:
        modes = ", ".join(dict.fromkeys(str(stage.mode) for stage in stages))
        raise NothingToMeasureError(
            f"Only a run that explores can be measured (mode explore, both or colocate); this is "
            f"of mode {modes}."
        )
    alone = found[-1].model_copy(deep=True)
    alone.mode = Mode.EXPLORE
    alone.stages = []
    alone.checkpoint_root_dir, alone.checkpoint_job_dir = str(root), ""
    alone.continue_from_checkpoint = False
    alone.ray_namespace = ""
    alone.monitor = MonitorConfig(monitor_type="tensorboard")
    alone.log = LogConfig(**alone.log.model_dump(exclude_unset=True, exclude={"save_dir"}))
    alone.synchronizer = SynchronizerConfig(  # never waits for weights
        sync_method=SyncMethod.CHECKPOINT, sync_style=SyncStyle.TRAINER_DRIVEN
    )
    alone.explorer.eval_on_startup = False
    _keep_data_apart(alone, total_steps)
    return alone


def _keep_data_apart(config: Config, total_steps: int) -> None:
    buffer, pipeline = config.buffer, config.data_processor.experience_pipeline
    buffer.total_steps = total_steps
    buffer.explorer_input.eval_tasksets = []
    buffer.trainer_input.experience_buffer = ExperienceBufferConfig(
        name="experiences", storage_type=StorageType.SQL
    )
    pipeline.input_save_path = None
    pipeline.inputs = {}
