from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.advantage_fn.base import AdvantageFn, GroupAdvantage

_HERE = "trinity.algorithm.advantage_fn"

ADVANTAGE_FN: "Registry[type[AdvantageFn] | type[GroupAdvantage]]" = Registry(
    "advantage function",
    {
        "grpo": f"{_HERE}.grpo.GRPOGroupAdvantage",
    },
)
