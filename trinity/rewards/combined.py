"""`combined_reward`: several rewards, weighted and reported one by one."""

from collections.abc import Mapping, Sequence
from typing import Any

from trinity.common.rewards import RewardFn, Scorer, make_scorer


class CombinedRewardFn(RewardFn):
    """The sum of several rewards. Each keeps its deadline, retries and part names.

    Args:
        parts: For each reward ``name`` (as in ``default_reward_fn_type``), and if wanted
            ``weight``, ``label`` (put before its part names) and ``args``.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if not parts:
            raise TypeError("combined_reward needs parts: [{name: ..., weight: ...}, ...]")
        self._scorers: list[tuple[str, float, Scorer]] = []
        for part in parts:
            unknown = set(part) - {"name", "weight", "label", "args"}
            if unknown or "name" not in part:
                raise TypeError(f"a part has name, weight, label and args, but got {dict(part)}")
            scorer = make_scorer(part["name"], part.get("args", {}))
            self._scorers.append((part.get("label", ""), float(part.get("weight", 1)), scorer))

    async def __call__(self, **kwargs: Any) -> dict[str, float]:
        total: dict[str, float] = {}
        for label, weight, scorer in self._scorers:
            for name, value in (await scorer.score(**kwargs)).items():
                name = f"{label}/{name}" if label else name
                total[name] = total.get(name, 0.0) + weight * value
        return total
