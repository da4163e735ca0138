from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.advantage_fn.base import AdvantageFn, GroupAdvantage

_HERE = "trinity.algorithm.advantage_fn"

ADVANTAGE_FN: "Registry[type[AdvantageFn] | type[GroupAdvantage]]" = Registry(
    "advantage function",
    {
        "asymre": f"{_HERE}.opmd.AsymREGroupAdvantage",
        "asymre_verl": f"{_HERE}.opmd.AsymREAdvantageFn",
        "clipb": f"{_HERE}.entropy_clip.CLIPBAdvantageFn",
        "clipv": f"{_HERE}.entropy_clip.CLIPVAdvantageFn",
        "gigpo": f"{_HERE}.gigpo.GiGPOGroupAdvantage",
        "grpo": f"{_HERE}.grpo.GRPOGroupAdvantage",
        "grpo_verl": f"{_HERE}.grpo_verl.GRPOAdvantageFn",
        "jsd": f"{_HERE}.distill.JSDAdvantageFn",
        "on_policy_distill": f"{_HERE}.distill.OnPolicyDistillAdvantageFn",
        "opmd": f"{_HERE}.opmd.OPMDGroupAdvantage",
        "opmd_verl": f"{_HERE}.opmd.OPMDAdvantageFn",
        "ppo": f"{_HERE}.returns.PPOAdvantageFn",
        "rec": f"{_HERE}.rec.RECGroupAdvantage",
        "reinforce": f"{_HERE}.reinforce.ReinforceGroupAdvantage",
        "reinforceplusplus": f"{_HERE}.returns.ReinforcePlusPlusAdvantageFn",
        "remax": f"{_HERE}.returns.RemaxAdvantageFn",
        "rloo": f"{_HERE}.grpo_verl.RLOOAdvantageFn",
        "step_wise_grpo": f"{_HERE}.step_wise_grpo.StepWiseGRPOGroupAdvantage",
    },
)
