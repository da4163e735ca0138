"""What is optimised: registries of algorithms and their methods, and the bases of plugins.

Importing this loads no torch: built-in entries, and the base classes below, load on first use.
"""

from typing import TYPE_CHECKING

from trinity.algorithm.advantage_fn import ADVANTAGE_FN
from trinity.algorithm.algorithm_type import ALGORITHM_TYPE, AlgorithmType
from trinity.algorithm.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity.algorithm.kl_fn import KL_FN
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN
from trinity.algorithm.sample_strategy import SAMPLE_STRATEGY
from trinity.utils.lazy import lazy_names

if TYPE_CHECKING:
    from trinity.algorithm.advantage_fn.base import AdvantageFn, GroupAdvantage
    from trinity.algorithm.entropy_loss_fn.entropy import EntropyLossFn
    from trinity.algorithm.kl_fn.base import KLFn
    from trinity.algorithm.policy_loss_fn.base import PolicyLossFn
    from trinity.algorithm.sample_strategy.base import SampleStrategy

__all__ = [
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "ENTROPY_LOSS_FN",
    "KL_FN",
    "POLICY_LOSS_FN",
    "SAMPLE_STRATEGY",
    "AdvantageFn",
    "AlgorithmType",
    "EntropyLossFn",
    "GroupAdvantage",
    "KLFn",
    "PolicyLossFn",
    "SampleStrategy",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AdvantageFn": "advantage_fn.base",
        "EntropyLossFn": "entropy_loss_fn.entropy",
        "GroupAdvantage": "advantage_fn.base",
        "KLFn": "kl_fn.base",
        "PolicyLossFn": "policy_loss_fn.base",
        "SampleStrategy": "sample_strategy.base",
    },
)
