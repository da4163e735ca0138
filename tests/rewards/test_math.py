import asyncio
import threading
from pathlib import Path

import pytest

from trinity.common.rewards import RewardError, RewardPolicy, Scorer, make_scorer
from trinity.rewards.equality import is_equal
from trinity.rewards.math import MathBoxedRewardFn, MathRewardFn, last_boxed
from trinity.utils.isolate import ProcessPool

_TABLE = Path(__file__).with_name("math_pairs.tsv").read_text().splitlines()
PAIRS = [
    (answer, truth, verdict == "1")
    for answer, truth, verdict in (line.split("\t") for line in _TABLE if not line.startswith("# "))
]
HANGS = "9^{9^{9^{9}}}"


def wrong_verdicts(verdicts):
    return [pair for pair, verdict in zip(PAIRS, verdicts, strict=True) if verdict != pair[2]]


@pytest.mark.slow
def test_the_table_of_answers_in_a_thread():
    assert len(PAIRS) >= 300
    verdicts = []
    thread = threading.Thread(
        target=lambda: verdicts.extend(is_equal(answer, truth) for answer, truth, _ in PAIRS)
    )
    thread.start()
    thread.join()
    assert not wrong_verdicts(verdicts)


@pytest.mark.slow
async def test_the_table_of_answers_in_processes():
    pool = ProcessPool(2)
    calls = [pool.run(is_equal, {"answer": a, "truth": t}, 60) for a, t, _ in PAIRS]
    assert not wrong_verdicts(await asyncio.gather(*calls))
    pool.close()


@pytest.mark.slow
async def test_the_table_of_answers_as_rewards():
    scorer = make_scorer("math_reward", {})
    scores = await asyncio.gather(
        *(scorer.score(response=f"<answer>{a}</answer>", truth=t) for a, t, _ in PAIRS)
    )
    assert not wrong_verdicts([score["accuracy"] == 1 for score in scores])


def test_parts_of_math_reward():
    reward = MathRewardFn()
    good = "<think>7 and 5</think>\n<answer>12</answer>"
    assert reward(response=good, truth="12") == {"accuracy": 1, "format_score": 0.1}
    assert reward(response="<answer>12</answer>", truth="12")["format_score"] == -0.1
    assert reward(response="It is 12", truth="#### 12")["accuracy"] == 1
    assert reward(response=good, truth="13")["accuracy"] == 0
    assert reward.quick(response=good, truth="12") == reward(response=good, truth="12")


def test_parts_of_math_boxed_reward():
    think = MathBoxedRewardFn(with_think=True, format_score_coef=0.2)
    assert think(response="\\boxed{\\frac{1}{2}}", truth="0.5") == {
        "accuracy": 1,
        "format_score": -0.2,
    }
    plain = MathBoxedRewardFn()
    assert plain(response="so \\boxed{3}", truth="3") == {"accuracy": 1, "format_score": 0}
    assert plain(response="so 3", truth="3") == {"accuracy": 0, "format_score": -0.1}
    assert last_boxed("\\boxed{1} then \\boxed{a{b}c} end") == "a{b}c"
    assert last_boxed("\\boxed{never closed") is None


async def test_an_answer_that_hangs_is_killed_and_hurts_no_other():
    scorer = Scorer(MathRewardFn(), RewardPolicy(timeout_s=12.0))
    async with asyncio.timeout(400):
        outcomes = await asyncio.gather(
            scorer.score(response=HANGS, truth="3"),
            *(scorer.score(response="it is 3, I say", truth="3") for _ in range(4)),
            return_exceptions=True,
        )
    assert isinstance(outcomes[0], RewardError)
    assert "not done after 12 s" in str(outcomes[0]) and HANGS in str(outcomes[0])
    assert [o["accuracy"] for o in outcomes[1:]] == [1] * 4
