"""The code on the pages runs, and does what they say."""

import re
from pathlib import Path

import pytest

from tests.workflows.agent_fakes import AgentModel
from trinity.common.models.fake import FakeModel
from trinity.common.rewards import REWARD_FUNCTIONS, make_scorer
from trinity.common.workflows import WORKFLOWS, Task
from trinity.workflows.agent.tools import Tool

DOCS = Path(__file__).parents[2] / "docs"


def page(name):
    """The names that the page's code defines."""
    text = (DOCS / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    names = {"__name__": f"docs.{name}"}
    exec(compile("\n".join(blocks), f"{name}.md", "exec"), names)
    return names


def run(workflow, model, repeat_times=1, **raw):
    made = Task(workflow=workflow, raw_task=raw).to_workflow(model)
    if made.repeatable:
        made.set_repeat_times(repeat_times, 0)
    return made.run()


def test_write_a_workflow():
    page("write_a_workflow")
    row = {"country": "France", "capital": "Paris"}
    assert run("capitals", FakeModel(["It is Paris."]), **row)[0].reward == 1
    many = run("capitals_at_once", FakeModel(["Paris", "Rome"]), 2, **row)
    assert [(e.eid.run, e.reward) for e in many] == [(0, 1), (1, 0)]
    polite = run("polite_capitals", FakeModel(["Paris"]), prompt="France?", response="Paris")
    assert polite[0].reward == 1


async def test_write_a_reward():
    page("write_a_reward")
    assert await make_scorer("brief", {}).score(response="a", truth="a") == {
        "accuracy": 1,
        "brevity": 1,
    }
    settings = {"max_characters": 40, "weights": {"reward": 0.5}, "timeout_s": 10}
    scorer = make_scorer("brief_with_limit", settings | {"on_error": "retry"})
    assert await scorer.score(response="a") == {"reward": 0.5}
    make_scorer("asks_a_service", {"url": "http://x"})


def test_multi_turn():
    page("multi_turn")
    won = run("guess_the_number", FakeModel(["3", "7"]), secret=7)
    assert won[0].reward == 1 and won[0].metrics["turns"] == 2
    lost = run("guess_the_number", FakeModel(["3"] * 8), secret=7)
    assert lost[0].reward == 0 and lost[0].metrics["turns"] == 8
    assert [e.reward for e in run("count_up", FakeModel(["1", "5"]))] == [1, 0]
    once = run("count_up_once", FakeModel(["1", "5", "3"]))
    assert [e.reward for e in once] == [pytest.approx(2 / 3)] * 3
    [escaped] = run("locked_door", FakeModel(["open it", "take key", "open it"]))
    assert escaped.reward == 1 and escaped.metrics["escaped"] == 1


async def test_agents():
    names = page("agents")
    task = Task(workflow="second_thoughts", raw_task={"prompt": "1+1", "response": "2"})
    [row] = await task.to_workflow(AgentModel(["3", "2"])).run_async()
    assert row.reward == 1 and row.metrics["turns"] == 2
    assert await Tool.of(names["population"]).call('{"city": "Oslo"}') == "700000"


@pytest.mark.parametrize(
    ("name", "registry"), [("write_a_workflow", WORKFLOWS), ("write_a_reward", REWARD_FUNCTIONS)]
)
def test_the_names_on_a_page_are_there(name, registry):
    text = (DOCS / f"{name}.md").read_text().rpartition("## Built-in")[2]
    found = re.findall(r"`([a-z_]+_(?:workflow|reward))`", text)
    assert len(found) > 10 and all(entry in registry for entry in found)
