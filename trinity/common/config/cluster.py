"""The `cluster:` section: which machines a run may use."""

from pydantic import Field

from trinity.common.config.base import ConfigModel


class ClusterConfig(ConfigModel):
    """Which machines a run may use."""

    ray_address: str = "auto"
    """Ray cluster to join. `auto`: `RAY_ADDRESS` if set, else the one that `ray start` left running
    here, else one of the run's own; `local`: always one of its own."""

    node_num: int = Field(0, ge=0)
    """Machines in the cluster; 0 takes what is found at start."""

    gpu_per_node: int = Field(0, ge=0)
    """GPUs on each machine; 0 takes what is found at start."""
