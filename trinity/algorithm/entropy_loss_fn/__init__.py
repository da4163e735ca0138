from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.entropy_loss_fn.entropy import EntropyLossFn

_HERE = "trinity.algorithm.entropy_loss_fn.entropy"

ENTROPY_LOSS_FN: "Registry[type[EntropyLossFn]]" = Registry(
    "entropy loss",
    {
        "default": f"{_HERE}.DefaultEntropyLossFn",
        "mix": f"{_HERE}.MixEntropyLossFn",
        "none": f"{_HERE}.NoEntropyLossFn",
    },
)
