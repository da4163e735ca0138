import functools
from typing import Literal

import pytest
import torch

from tests.workflows.agent_fakes import AgentModel
from tests.workflows.test_built_in import run
from trinity.common.experience import Experience
from trinity.common.models.fake import FakeModel
from trinity.common.models.settings import ModelSettings
from trinity.common.workflows import Task
from trinity.workflows.agent.merge import merge_turns
from trinity.workflows.agent.tools import Tool, load_tools, parameters_schema, type_schema


def weather(city: str, days: int = 1, units: list[str] | None = None) -> dict:
    """The weather of a city."""
    if city == "Atlantis":
        raise LookupError("under water")
    return {"city": city, "days": days}


def script():
    return [
        [("python", {"code": "print(6 * 7)"}), ("weather", {"city": "Oslo"})],
        [("weather", {"city": "Atlantis"}), ("nothing", {}), ("weather", {"town": "x"})],
        "So \\boxed{42}",
    ]


ARGUMENTS = {"tools": ["python", "tests.workflows.test_agents.weather"]}


async def test_an_agent_with_parallel_tools_gives_one_row():
    model = AgentModel(script(), version=2)
    [row], _ = await run("react_workflow", [], model=model, repeat_times=1, workflow_args=ARGUMENTS)
    assert row.reward == 1
    assert row.metrics["turns"] == 3 and row.metrics["tool_calls"] == 5
    observed = model.requests[2]["messages"]
    assert [m["role"] for m in observed[:6]] == ["system", "user", "assistant"] + ["tool"] * 2 + [
        "assistant"
    ]
    assert observed[3]["content"] == "42" and '"city": "Oslo"' in observed[4]["content"]
    errors = [m["content"] for m in observed[6:]]
    assert "under water" in errors[0] and "no tool 'nothing'" in errors[1]
    assert "missing a required argument" in errors[2]
    said = bytes(row.tokens[row.prompt_length :][row.action_mask].tolist()).decode()
    assert said.count("<assistant>") == 3 and "<tool>" not in said
    assert row.token_versions[row.action_mask].unique().tolist() == [2]
    assert (row.logprobs[row.action_mask] == -1).all() and (
        row.logprobs[~row.action_mask] == 0
    ).all()


async def test_each_reply_may_be_a_row():
    arguments = ARGUMENTS | {"merge_turns": False}
    rows, _ = await run(
        "react_workflow",
        [],
        model=AgentModel(script(), version=2),
        repeat_times=1,
        workflow_args=arguments,
    )
    assert [(r.eid.step, r.reward) for r in rows] == [(0, 1), (1, 1), (2, 1)]


async def test_an_agent_ends_at_max_turns():
    model = AgentModel([[("python", {"code": "1"})]] * 9, version=2)
    [row], _ = await run(
        "react_workflow", [], model=model, repeat_times=1, workflow_args={"max_turns": 2}
    )
    assert row.metrics["turns"] == 2 and row.reward == -0.1


def test_agents_need_a_history():
    model = FakeModel([])
    model._settings = ModelSettings(model_path="x")
    with pytest.raises(ValueError, match="enable_history"):
        Task(workflow="react_workflow", raw_task={"prompt": "q"}).to_workflow(model)


def test_schemas_come_from_signatures():
    assert parameters_schema(weather) == {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    }
    assert Tool.of(weather).schema["function"]["description"] == "The weather of a city."
    with pytest.raises(ValueError, match="Built in: python"):
        load_tools(["pyhton"])


async def test_long_results_are_cut():
    tool = Tool.of(lambda: "x" * 100, "many", limit=10)
    assert await tool.call("{}") == "x" * 10 + " [cut]"
    tool = Tool.of(lambda: "x")
    assert "JSON object" in await tool.call("[1]") and "Error" in await tool.call("{broken")


def turn(ids, prompt_length, **kw):
    count = len(ids) - prompt_length
    return Experience(tokens=ids, prompt_length=prompt_length, logprobs=[-0.5] * count, **kw)


def test_turns_of_several_temperatures_are_no_row():
    first = turn([1, 2, 3, 4], 2, info={"temperature": 1.0})
    second = turn([1, 2, 3, 4, 9, 5], 5, info={"temperature": 0.5})
    third = turn([1, 2, 3, 4, 9, 5, 8, 6], 7, info={"temperature": 0.5})
    alone, merged = merge_turns([first, second, third])
    assert alone is first and merged.info["temperature"] == 0.5
    assert merged.action_mask.tolist() == [True, False, True]


def test_a_merged_row_has_its_images_and_says_whether_it_is_a_fork():
    images = {"pixel_values": torch.zeros(2, 3, 1, 1)}
    first = turn([1, 2, 3, 4], 2, metrics={"token_fork": 1.0, "accuracy": 0.0})
    second = turn([1, 2, 3, 4, 9, 5], 5, metrics={"token_fork": 0.0, "accuracy": 1.0})
    second.multi_modal_inputs = images
    [merged] = merge_turns([first, second])
    assert merged.multi_modal_inputs is images
    assert merged.metrics == {"token_fork": 1.0, "accuracy": 1.0}


async def test_each_reply_of_an_agent_keeps_what_is_known_of_it_alone():
    model = AgentModel(script(), version=2)
    made = model.create

    async def create(**asked):
        reply = await made(**asked)
        count = len(model._history)
        model._history[-1].metrics = {"token_fork": 1.0} if count == 2 else {}
        return reply

    model.create = create
    row = {"prompt": "6*7?", "response": "42"}
    arguments = ARGUMENTS | {"merge_turns": False}
    workflow = Task(workflow="react_workflow", raw_task=row, workflow_args=arguments)
    replies = await workflow.to_workflow(model).run_async()
    assert [r.metrics.get("token_fork") for r in replies] == [None, 1, None]
    assert [(r.reward, r.metrics["accuracy"]) for r in replies] == [(1, 1)] * 3


async def test_a_tool_may_be_decorated_and_may_give_what_json_has_not():
    async def inner(word: str) -> str:
        return word * 2

    @functools.wraps(inner)
    def decorated(word):
        return inner(word)

    assert await Tool.of(decorated).call({"word": "ab"}) == "abab"
    assert (await Tool.of(lambda: {(1, 2): 3}, "pairs").call("{}")).startswith("Error: TypeError")
    assert type_schema(Literal[1, 2]) == {"type": "integer", "enum": [1, 2]}


def test_chains_are_merged_and_forks_are_not():
    first = turn([1, 2, 3, 4], 2, token_versions=[5, 5])
    second = turn([1, 2, 3, 4, 9, 9, 5], 6, token_versions=[6], reward=1.0)
    fork = turn([1, 2, 8, 9, 7], 4, token_versions=[6])
    other = turn([7, 7, 7], 2, token_versions=[6])
    merged, alone, forked = merge_turns([first, other, second, fork])
    assert merged.tokens.tolist() == [1, 2, 3, 4, 9, 9, 5] and merged.prompt_length == 2
    assert merged.action_mask.tolist() == [True, True, False, False, True]
    assert merged.logprobs.tolist() == [-0.5, -0.5, 0, 0, -0.5]
    assert merged.token_versions.tolist() == [5, 5, -1, -1, 6] and merged.reward == 1
    assert torch.equal(alone.tokens, other.tokens) and torch.equal(forked.tokens, fork.tokens)


def test_a_merged_row_has_the_routes_that_each_turn_was_sampled_with():
    routes = [torch.full((n, 1, 2), turn, dtype=torch.int16) for turn, n in enumerate((4, 7, 9))]
    for one in routes:
        one[-1] = -1  # sampled, and not computed
    ids = [1, 2, 3, 4, 9, 9, 5, 8, 6]
    chain = [
        turn(ids[:4], 2, routed_experts=routes[0]),
        turn(ids[:7], 6, routed_experts=routes[1]),
        turn(ids, 8, routed_experts=routes[2]),
    ]
    [merged] = merge_turns(chain)
    assert merged.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, -1]
    chain[1].routed_experts = None
    [merged] = merge_turns(chain)
    assert torch.equal(merged.routed_experts, routes[2])
