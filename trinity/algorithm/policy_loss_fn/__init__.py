from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.policy_loss_fn.base import PolicyLossFn

_HERE = "trinity.algorithm.policy_loss_fn"

POLICY_LOSS_FN: "Registry[type[PolicyLossFn]]" = Registry(
    "policy loss",
    {
        "ppo": f"{_HERE}.ppo.PPOPolicyLossFn",
        "sft": f"{_HERE}.sft.SFTPolicyLossFn",
    },
)
