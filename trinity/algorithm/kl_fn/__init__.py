from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.algorithm.kl_fn.base import KLFn

_ESTIMATORS = "trinity.algorithm.kl_fn.estimators"

KL_FN: "Registry[type[KLFn]]" = Registry(
    "KL function",
    {
        "none": f"{_ESTIMATORS}.NoKL",
        "k1": f"{_ESTIMATORS}.K1Fn",
        "k2": f"{_ESTIMATORS}.K2Fn",
        "k3": f"{_ESTIMATORS}.K3Fn",
        "low_var_kl": f"{_ESTIMATORS}.LowVarKLFn",
        "abs": f"{_ESTIMATORS}.AbsFn",
        "corrected_k3": f"{_ESTIMATORS}.CorrectedK3Fn",
    },
)
