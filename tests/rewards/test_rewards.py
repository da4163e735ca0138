import json

import pytest

from trinity.common.rewards import REWARD_FUNCTIONS, make_scorer
from trinity.rewards.accuracy import AccuracyRewardFn
from trinity.rewards.countdown import CountdownRewardFn, evaluate
from trinity.rewards.dapo import MathDAPORewardFn
from trinity.rewards.exact_match import ExactMatchRewardFn
from trinity.rewards.format import FormatRewardFn
from trinity.rewards.sudoku import SudokuRewardFn, as_grid
from trinity.rewards.tool_call import ToolCallRewardFn, parse_calls


def test_every_name_resolves():
    for name in REWARD_FUNCTIONS.names():
        assert callable(REWARD_FUNCTIONS.get(name))


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("98", 0.1),
        ("44 + 19 + 35", 1),
        ("(44+19)+35 = 98", 1),
        ("44 + 19 + 35 + 0", 0.1),
        ("44 + 44 + 10", 0.1),
        ("(35 + 19 + 44)", 1),
        ("__import__('os').system('true')", 0.1),
        ("9**9**9", 0.1),
        ("44 / 0", 0.1),
        ("(" * 400 + "1", 0.1),
        ("", 0.1),
    ],
)
def test_countdown(answer, score):
    truth = json.dumps({"target": 98, "numbers": [44, 19, 35]})
    reward = CountdownRewardFn()
    assert reward(response=f"hm <answer>{answer}</answer>", truth=truth) == {"score": score}
    assert reward(response=answer, truth=truth) == {"score": 0}


def test_countdown_is_exact_where_floats_are_not():
    value, used = evaluate("(1/3 + 1/3 + 1/3) * 7")
    assert value == 7 and len(used) == 7


def test_dapo_penalty_grows_over_the_cache():
    reward = MathDAPORewardFn(True, 1.0, max_response_length=100, cache_length=20)
    for num_tokens, penalty in [(80, 0), (90, -0.5), (100, -1), (150, -1)]:
        parts = reward(response="Answer: 5", truth="5", response_token=[0] * num_tokens)
        assert parts == {"accuracy": 1, "format_score": penalty}
    assert MathDAPORewardFn()("no answer", "5", [0])["accuracy"] == -1
    with pytest.raises(TypeError, match="cache_length"):
        MathDAPORewardFn(enable_overlong_penalty=True)


def test_format_and_exact_match_and_accuracy():
    assert FormatRewardFn()("<think>a</think><answer>b</answer>") == {"format_score": 0.1}
    assert FormatRewardFn()("<answer>b</answer>") == {"format_score": -0.1}
    twice = "<think>a</think><answer>b</answer><answer>c</answer>"
    assert FormatRewardFn()(twice) == {"format_score": -0.1}
    assert ExactMatchRewardFn()(" ab\n", ["ba", "ab"]) == {"accuracy": 1}
    assert AccuracyRewardFn(str.upper)("a", "A") == {"accuracy": 1}
    assert AccuracyRewardFn("os.path.basename")("x/7", "7") == {"accuracy": 1}


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "b": "x"}}</tool_call>', 1),
        (
            '<think>m</think><tool_call>{"name": "f", "arguments": {"b": "x", "a": 1}}</tool_call>',
            1,
        ),
        ('[{"name": "f", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}]', 1),
        ('[f(a=1, b="x")]', 1),
        ('[f(a=2, b="x")]', 0),
        ('[f(a=1, b="x"), g()]', 0),
        ("<tool_call>{broken</tool_call>", 0),
        ("[f(a=open('/etc/passwd'))]", 0),
        ("I can't", 0),
    ],
)
def test_tool_calls(response, accuracy):
    truth = [{"name": "f", "arguments": {"a": 1, "b": "x"}}]
    for form in (truth, json.dumps(truth)):
        assert ToolCallRewardFn()(response, form)["accuracy"] == accuracy


def test_tool_call_forms():
    assert parse_calls('[Get Weather.now(city="Oslo"), other(n=[1, 2])]') == [
        ("Get Weather.now", '{"city": "Oslo"}'),
        ("other", '{"n": [1, 2]}'),
    ]
    assert parse_calls("no call at all") == []
    assert ToolCallRewardFn()("no call at all", [])["accuracy"] == 1
    assert ToolCallRewardFn()("<tool_call>{", [])["format_score"] == -0.1


def test_sudoku():
    solution = "1234341221434321"
    puzzle = "1..434122.4343.1"
    row = {"puzzle": puzzle, "solution": solution}
    reward = SudokuRewardFn(cell_coef=0.5)
    assert reward(f"<answer>{solution}</answer>", row) == {"accuracy": 1, "cells": 0.5}
    half = solution[:14] + "3" + solution[15:]
    assert reward(half, row) == {"accuracy": 0, "cells": pytest.approx(0.375)}
    assert reward("no grid", row)["accuracy"] == 0
    other = "2134341221434321"
    assert reward(other, {"puzzle": puzzle})["accuracy"] == 0
    assert as_grid(puzzle)[0] == [1, 0, 0, 4]


async def test_reasoning_gym_judges_with_its_own_scorer():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    row = reasoning_gym.create_dataset("chain_sum", size=1, seed=3)[0]
    scorer = make_scorer("reasoning_gym_reward", {})
    right = await scorer.score(response=f"<answer> {row['answer']} </answer>", metadata=row)
    wrong = await scorer.score(response="<answer>none</answer>", metadata=row)
    assert right == {"accuracy": 1} and wrong["accuracy"] < 0.1


async def test_combined_reward_reports_its_parts():
    parts = [
        {"name": "exact_match_reward", "weight": 2},
        {"name": "format_reward", "label": "form", "args": {"coef": 0.5}},
    ]
    scorer = make_scorer("combined_reward", {"parts": parts})
    assert await scorer.score(response="4", truth="4") == {
        "accuracy": 2,
        "form/format_score": -0.5,
    }
    with pytest.raises(TypeError, match="weight, label"):
        make_scorer("combined_reward", {"parts": [{"nmae": "x"}]})
