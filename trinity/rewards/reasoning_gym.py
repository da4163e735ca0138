"""`reasoning_gym_reward`: the data set's own scorer judges the answer."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trinity.common.extras import needed
from trinity.common.rewards import RewardFn

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


class ReasoningGymRewardFn(RewardFn):
    """``accuracy``: what the scorer of the row's data set gives the text in ``<answer>`` (all of
    the response, without such a tag), in 0 .. 1.
    """

    is_isolated = True

    def __init__(self) -> None:
        super().__init__()

    def prepare(self) -> None:
        _gym()

    def quick(self, response: str, metadata: Mapping[str, Any]) -> dict[str, float] | None:
        is_same = _answer_in(response) == str(metadata.get("answer"))
        return {"accuracy": 1.0} if is_same else None

    def __call__(self, response: str, metadata: Mapping[str, Any]) -> dict[str, float]:
        name = metadata.get("dataset_name") or metadata["metadata"]["source_dataset"]
        score = _data_set(name).score_answer(_answer_in(response), dict(metadata))
        return {"accuracy": float(score)}


def _gym() -> Any:
    return needed("reasoning_gym", "gym", "reasoning_gym_reward")


@lru_cache
def _data_set(name: str) -> Any:
    return _gym().create_dataset(name, size=1)


def _answer_in(response: str) -> str:
    answers = _ANSWER.findall(response)
    return (answers[-1] if answers else response).strip()
