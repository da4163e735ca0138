"""Workflows on the real ModelWrapper: what is trained on is what was sampled, over many turns."""

import json

import pytest

from tests.common.models.toy import model_folder, tokenizer
from tests.workflows.test_agents import ARGUMENTS
from trinity.common.experience import deserialize_many
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.fake import FakeEngine
from trinity.common.workflows import Task
from trinity.engine.torch import TorchEngine, TorchEngineSettings
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.units import Unit


def wrapper(replies, template="qwen25", **settings):
    made = tokenizer(template)
    ids = [[*made.encode(text), made.eos_token_id] for text in replies]
    settings = {"name": "toy", "enable_history": True, "max_model_len": 8192, **settings}
    engine = FakeEngine(ids, end_ids=[made.eos_token_id])
    return ModelWrapper(engine, ModelSettings("/models/toy", **settings), made), ids


async def run(model, repeat_times=1, raw=None, **kw):
    raw = raw or {"prompt": "6*7?", "response": "42"}
    task = Task(raw_task=raw, repeat_times=repeat_times, batch_id=1, task_id=2, **kw)
    runner = WorkflowRunner(0, model)
    await runner.prepare()
    result = await runner.run_unit(Unit(0, task, tuple(range(repeat_times)), 7, 250.0))
    await runner.close()
    assert not [r.error for r in result.runs if r.error], result.runs[0].error
    return deserialize_many(result.payload), result


def sampled(row):
    return row.tokens[row.prompt_length :][row.action_mask].tolist()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_an_agent_over_eight_turns_with_parallel_calls():
    turn = "let me see\n" + "\n".join(call("weather", city=c) for c in ("Oslo", "Rome"))
    replies = [turn] * 7 + ["so \\boxed{42}"]
    model, ids = wrapper(replies, tool_call_parser="hermes", enable_auto_tool_choice=True)
    [row], _ = await run(model, workflow="react_workflow", workflow_args=ARGUMENTS)
    assert sampled(row) == [token for reply in ids for token in reply]
    assert row.reward == 1 and row.metrics["turns"] == 8 and row.metrics["tool_calls"] == 14
    assert (row.logprobs[row.action_mask] == -1).all()


@pytest.mark.parametrize(
    ("workflow", "first", "arguments", "raw"),
    [
        ("react_workflow", call("weather", city="Oslo " * 60), ARGUMENTS, None),
        ("python_tool_workflow", "```python\nprint('7 ' * 900)\n```", {}, None),
        ("math_hint_workflow", "no " * 400, {}, None),
        ("sudoku_workflow", "no " * 400, {"max_turns": 3}, {"size": 4, "seed": 1}),
    ],
)
async def test_a_conversation_that_outgrows_the_model_ends_with_what_was_sampled(
    workflow, first, arguments, raw
):
    settings = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    model, ids = wrapper([first, "so \\boxed{42}"], max_model_len=900, **settings)
    rows, _ = await run(model, workflow=workflow, workflow_args=arguments, raw=raw)
    found = [token for row in rows for token in sampled(row)]
    assert found and found == ids[0][: len(found)]  # no second turn
    if workflow == "react_workflow":
        assert [row.metrics["outgrown"] for row in rows] == [1]


async def test_an_agentscope_agent_over_eight_turns():
    pytest.importorskip("agentscope")
    turn = "let me see\n" + "\n".join(call("weather", city=c) for c in ("Oslo", "Rome"))
    replies = [turn] * 7 + ["so \\boxed{42}"]
    model, ids = wrapper(replies, tool_call_parser="hermes", enable_auto_tool_choice=True)
    rows, _ = await run(model, workflow="as_react_workflow", workflow_args=ARGUMENTS)
    assert [token for row in rows for token in sampled(row)] == [
        token for reply in ids for token in reply
    ]
    assert all(row.reward == 1 for row in rows)


@pytest.mark.parametrize("template", ["chatml", "smollm", "qwen25", "llama3"])
async def test_code_over_turns_keeps_the_sampled_tokens(template):
    replies = ["hm\n```python\nprint(6 * 7)\n```", "```python\n1/0\n```", "so \\boxed{42}"]
    model, ids = wrapper(replies, template)
    [row], _ = await run(model, workflow="python_tool_workflow")
    assert sampled(row) == [token for reply in ids for token in reply]
    assert row.reward == 1 and row.metrics["code_errors"] == 1
    assert row.metrics.get("token_fork", 0.0) == 0


@pytest.mark.parametrize(
    ("workflow", "raw", "arguments"),
    [
        ("simple_workflow", {"prompt": "hi", "response": "x"}, {}),
        ("math_workflow", {"prompt": "1+1", "response": "2"}, {}),
        ("math_boxed_workflow", {"prompt": "1+1", "response": "2"}, {"use_base": True}),
        ("math_hint_workflow", {"prompt": "1+1", "response": "2"}, {}),
        ("sudoku_workflow", {"size": 4, "seed": 1}, {"max_turns": 2}),
        ("frozen_lake_workflow", {"seed": 1}, {"agent_max_steps": 3}),
        ("frozen_lake_workflow", {"seed": 1}, {"agent_max_steps": 3, "step_wise": True}),
        ("react_workflow", {"prompt": "1+1", "response": "2"}, {}),
        ("python_tool_workflow", {"prompt": "1+1", "response": "2"}, {}),
    ],
)
async def test_built_ins_on_a_tiny_model(tmp_path, workflow, raw, arguments):
    if workflow == "frozen_lake_workflow":
        pytest.importorskip("gymnasium")
    folder = model_folder(tmp_path, "qwen25")
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", num_threads=1))
    await engine.prepare()
    settings = ModelSettings(
        folder,
        max_model_len=1000,
        max_response_tokens=8,
        enable_history=True,
        tool_call_parser="hermes",
        enable_auto_tool_choice=True,
    )
    model = ModelWrapper(engine, settings)
    reward_fn = "exact_match_reward" if workflow == "simple_workflow" else None
    task = {"workflow": workflow, "raw": raw, "workflow_args": arguments, "reward_fn": reward_fn}
    rows, _ = await run(model, 2, **task)
    again, _ = await run(ModelWrapper(engine, settings), 2, **task)
    assert {row.eid.run for row in rows} == {0, 1}
    assert [r.tokens.tolist() for r in rows] == [r.tokens.tolist() for r in again]
    for row in rows:
        assert row.reward is not None and row.action_mask.any()
        whole = await engine.logprobs(row.tokens.tolist(), 1.0)
        direct = whole[row.prompt_length - 1 :]
        for value, expected, is_on in zip(row.logprobs, direct, row.action_mask, strict=True):
            assert not is_on or abs(float(value) - expected) < 1e-5
    await engine.close()
