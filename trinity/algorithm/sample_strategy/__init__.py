from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.sample_strategy.base import SampleStrategy

_HERE = "trinity.algorithm.sample_strategy"

SAMPLE_STRATEGY: "Registry[type[SampleStrategy]]" = Registry(
    "sample strategy",
    {
        "default": f"{_HERE}.default.DefaultSampleStrategy",
        "mix": f"{_HERE}.mix.MixSampleStrategy",
        "staleness_control": f"{_HERE}.default.StalenessControlSampleStrategy",
        "warmup": f"{_HERE}.default.WarmupSampleStrategy",
    },
)
