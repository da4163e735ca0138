import pytest

from tests.workflows.agent_fakes import AgentModel
from tests.workflows.test_built_in import run

pytest.importorskip("agentscope")


async def test_an_agentscope_agent_is_trained_as_it_is():
    calls = [
        [("python", {"code": "print(6 * 7)"}), ("python", {"code": "print(1)"})],
        "So \\boxed{42}",
    ]
    model = AgentModel(calls, version=2)
    arguments = {"merge_turns": False, "type": "gsm8k"}
    rows, _ = await run(
        "as_react_workflow", [], model=model, repeat_times=1, workflow_args=arguments
    )
    assert [(r.eid.step, r.reward) for r in rows] == [(0, 1), (1, 1)]
    shown = model.requests[1]["messages"]
    assert [m["role"] for m in shown] == ["system", "user", "assistant", "tool", "tool"]
    assert "42" in str(shown[3]["content"])


async def solve(task, model):
    from agentscope.message import UserMsg

    reply = await model([UserMsg(name="user", content=task["prompt"])])
    return {"response": reply.content[0].text, "metrics": {"length": 2}}


def judge(task, response):
    return {"reward": float(task["response"] in response)}


async def test_functions_for_agentscopes_tuner():
    here = "tests.workflows.test_agentscope"
    arguments = {"workflow_func": f"{here}.solve", "judge_func": f"{here}.judge"}
    [row], _ = await run(
        "agentscope_workflow_adapter",
        [],
        model=AgentModel(["it is 42"], version=2),
        repeat_times=1,
        workflow_args=arguments,
    )
    assert row.reward == 1 and row.metrics["length"] == 2
