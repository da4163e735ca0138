from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.policy_loss_fn.base import PolicyLossFn

_HERE = "trinity.algorithm.policy_loss_fn"

POLICY_LOSS_FN: "Registry[type[PolicyLossFn]]" = Registry(
    "policy loss",
    {
        "cispo": f"{_HERE}.cispo.CISPOPolicyLossFn",
        "dpo": f"{_HERE}.dpo.DPOPolicyLossFn",
        "gspo": f"{_HERE}.gspo.GSPOPolicyLossFn",
        "importance_sampling": f"{_HERE}.importance_sampling.ImportanceSamplingPolicyLossFn",
        "mix": f"{_HERE}.mix.MixPolicyLossFn",
        "mix_chord": f"{_HERE}.mix.MixCHORDPolicyLossFn",
        "opmd": f"{_HERE}.opmd.OPMDPolicyLossFn",
        "ppo": f"{_HERE}.ppo.PPOPolicyLossFn",
        "rec": f"{_HERE}.rec.RECPolicyLossFn",
        "sapo": f"{_HERE}.sapo.SAPOPolicyLossFn",
        "sft": f"{_HERE}.sft.SFTPolicyLossFn",
        "sft_is": f"{_HERE}.sft.SFTISPolicyLossFn",
        "sft_phi": f"{_HERE}.sft.PhiSFTPolicyLossFn",
        "sppo": f"{_HERE}.sppo.SPPOPolicyLossFn",
        "topr": f"{_HERE}.topr.TOPRPolicyLossFn",
    },
)
