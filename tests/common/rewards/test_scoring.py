import asyncio
import threading

import pytest

from trinity.common.rewards import RewardError, RewardFn, RewardPolicy, Scorer, make_scorer


async def test_a_reward_gets_what_it_names():
    def by_name(response, truth, metadata):
        return {"got": float(response == "r" and truth == "t" and metadata == {"k": 1})}

    seen = {"response": "r", "truth": "t", "metadata": {"k": 1}, "task": None}
    assert await Scorer(by_name).score(**seen) == {"got": 1}

    def all_of_it(**kwargs):
        return float(kwargs == seen)

    assert await Scorer(all_of_it).score(**seen) == {"reward": 1}


async def test_async_rewards_and_weights():
    class Judge(RewardFn):
        async def __call__(self, response):
            await asyncio.sleep(0)
            return {"a": 1.0, "b": 2}

    scorer = make_scorer(Judge, {"weights": {"a": 0.5}})
    assert await scorer.score(response="x") == {"a": 0.5, "b": 2}


async def test_a_plain_function_may_give_coroutines_at_every_call():
    async def judge(response):
        await asyncio.sleep(0)
        return 1.0

    def reward(response):
        return judge(response) if response else 0.0

    scorer = Scorer(reward)
    for texts in ([""], ["", ""], ["a", ""], ["a", "b"], ["a", "b"]):
        found = await scorer.score_all([{"response": text} for text in texts])
        assert found == [{"reward": float(bool(text))} for text in texts]


async def test_many_slow_rewards_run_side_by_side():
    meeting = threading.Barrier(64)  # where nobody goes on before all are there

    def slow(response):
        meeting.wait(60)
        return 1.0

    found = await asyncio.gather(*(Scorer(slow).score(response="x") for _ in range(64)))
    assert found == [{"reward": 1}] * 64


async def test_retry_calls_again_and_then_gives_up():
    calls = []

    def flaky(response):
        calls.append(response)
        if len(calls) < 3:
            raise ConnectionError("busy")
        return 1.0

    policy = RewardPolicy(on_error="retry", max_retries=2, retry_wait_s=0.01)
    assert await Scorer(flaky, policy).score(response="x") == {"reward": 1}
    calls.clear()
    once = RewardPolicy(on_error="drop")
    with pytest.raises(RewardError, match="busy") as caught:
        await Scorer(flaky, once).score(response="some text")
    assert "some text" in str(caught.value) and not caught.value.is_fatal


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", {}, {"a": None}])
async def test_what_is_no_number_is_no_score(value):
    with pytest.raises(RewardError):
        await Scorer(lambda response: value).score(response="x")


class Endless(RewardFn):
    """Loops in a process of its own."""

    is_isolated = True

    def __call__(self, response):
        while True:
            pass


async def test_a_loop_and_a_sleep_end_at_the_deadline():
    def loop(response):
        while True:
            pass

    async def sleep(response):
        await asyncio.sleep(1000)

    def later(response):
        return sleep(response)

    for hanging in (loop, sleep, later, Endless()):
        policy = RewardPolicy(timeout_s=0.3, on_error="raise")
        with pytest.raises(RewardError) as caught:
            async with asyncio.timeout(60):
                await Scorer(hanging, policy).score(response="x")
        assert caught.value.is_fatal


def test_mistakes_are_told_at_the_start():
    def asks_for_more(response, colour):
        return 1.0

    class Strict(RewardFn):
        def __init__(self, coef: float = 1.0):
            self.coef = coef

        def __call__(self, response):
            return self.coef

    with pytest.raises(TypeError, match=r"'colour', which no workflow.*response"):
        make_scorer(asks_for_more, {})
    with pytest.raises(TypeError, match="unexpected keyword argument 'ceof'"):
        make_scorer(Strict, {"ceof": 2})
    with pytest.raises(ValueError, match="on_error is 'ignore'"):
        make_scorer(Strict, {"on_error": "ignore"})
    with pytest.raises(LookupError, match="math_reward"):
        make_scorer("math_rewrad", {})
    with pytest.raises(ValueError, match="derive it from RewardFn"):
        make_scorer(dict, {})


async def test_quick_rewards_share_a_thread_and_still_fail_alone():
    def quick(response):
        if response == "bad":
            raise ValueError("no")
        if response == "hang":
            while True:
                pass
        return float(response)

    scorer = Scorer(quick, RewardPolicy(timeout_s=10.0))
    async with asyncio.timeout(60):
        while not scorer._is_quick():  # a pause of the machine counts in the mean of its calls
            await scorer.score(response="1")
    texts = ["1", "bad", "3", "hang", "5", "6"]
    outcomes = await scorer.score_all([{"response": text} for text in texts])
    values = [o["reward"] if isinstance(o, dict) else str(o) for o in outcomes]
    assert values[0] == 1 and values[2] == 3 and values[4:] == [5, 6]
    assert "ValueError: no" in values[1] and "not done after 10 s" in values[3]
