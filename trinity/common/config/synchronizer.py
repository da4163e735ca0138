"""The `synchronizer:` section: how and how often new weights reach the explorer."""

from pydantic import Field

from trinity.common.config.base import ConfigModel
from trinity.common.constants import SyncMethod, SyncStyle


class SynchronizerConfig(ConfigModel):
    """How and how often new weights reach the explorer."""

    sync_method: SyncMethod | None = None
    """How weights travel: `nccl` from GPU to GPU (mode `both` only), `checkpoint` through files,
    `memory` from process to process. Unset: by mode and engine."""

    sync_style: SyncStyle = SyncStyle.FIXED
    """Who decides when to sync: `fixed` every `sync_interval` steps on both sides,
    `explorer_driven`, `trainer_driven`, or `fully_async`."""

    sync_interval: int = Field(1, ge=1)
    """Steps between two syncs, on both sides."""

    explorer_sync_interval: int | None = Field(None, ge=1)
    """Explorer steps between two syncs. Unset: `sync_interval`."""

    trainer_sync_interval: int | None = Field(None, ge=1)
    """Trainer steps between two syncs. Unset: `sync_interval`."""

    sync_offset: int = Field(0, ge=0)
    """Explorer steps that may run ahead of the trainer; data is up to that many steps older."""

    sync_timeout: float = Field(3600, gt=0)
    """Seconds before the run stops that one sync may take, or a step of one operator of the
    experience pipeline."""

    group_name: str = "rollout_weight_sync"
    """Name of the NCCL group that trainer and engines form."""

    delta: bool = False
    """With `nccl`, send engines only the weights whose bits changed since they last got some. The
    trainer keeps a copy of the version before, in the memory of its GPU."""

    wait_for_checkpoint: bool = False
    """With `checkpoint`, let the explorer wait until a first checkpoint exists. Here it starts with
    the weights it has: `true` is refused."""
