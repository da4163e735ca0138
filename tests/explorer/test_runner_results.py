"""What a workflow gives back that is no list of experiences is told in a sentence of its own."""

import numpy as np
import pytest
import torch

from tests.explorer.fakes import EchoModel, task
from trinity.common.experience import Experience, deserialize_many
from trinity.common.workflows import Workflow
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.units import RunResult, Unit


async def result_of(workflow: type[Workflow]) -> RunResult:
    runner = WorkflowRunner(0, EchoModel(0.0), ())
    await runner.prepare()
    unit = Unit(0, task(workflow, repeat_times=1), (0,), 7, 30.0)
    [result] = (await runner.run_unit(unit)).runs
    await runner.close()
    return result


def workflow_giving(given: object) -> type[Workflow]:
    class Mine(Workflow):
        def run(self) -> object:
            return given

    return Mine


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (None, "None"),
        ("hello", "a str"),
        ({"reward": 1.0}, "a dict"),
        (3, "an int"),
        (["hello"], "a list that holds a str"),
        ([None], "a list that holds None"),
    ],
)
async def test_what_is_no_list_of_experiences_is_named(given: object, what: str) -> None:
    result = await result_of(workflow_giving(given))
    assert result.error == (
        f"Mine.run returned {what}, and a workflow returns a list of experiences: "
        "end it with `return [experience]`."
    )


async def test_a_run_method_that_is_a_coroutine_is_named() -> None:
    class Mine(Workflow):
        async def run(self) -> list:
            return []

    result = await result_of(Mine)
    assert result.error == (
        "Mine.run is a coroutine: call it run_async, and set is_async = True in the class."
    )


async def test_an_error_inside_of_trinity_is_told_without_frames(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Mine(Workflow):
        pass

    result = await result_of(Mine)
    assert (
        result.error == f"NotImplementedError: {Mine.__qualname__} has neither run nor run_async."
    )
    assert "workflow.py" in capsys.readouterr().err  # the log has them


async def test_an_error_of_a_workflow_shows_the_frames_of_the_workflow_alone() -> None:
    class Mine(Workflow):
        def run(self) -> list:
            return self.task.raw_taks

    result = await result_of(Mine)
    frames = [line for line in result.error.splitlines() if line.startswith("  File")]
    assert len(frames) == 1 and "test_runner_results.py" in frames[0]
    assert "raw_taks" in result.error.splitlines()[-1]


@pytest.mark.parametrize(("info", "version"), [({}, 3), ({"model_version": 1}, 1)])
async def test_experiences_that_a_workflow_made_have_the_version_of_now(
    info: dict[str, object], version: int
) -> None:
    made = Experience(tokens=[1, 2, 3], prompt_length=1, reward=1.0, info=info)
    runner = WorkflowRunner(0, EchoModel(0.0), ())
    await runner.prepare()
    unit = Unit(0, task(workflow_giving([made]), repeat_times=1), (0,), 7, 30.0)
    [found] = deserialize_many((await runner.run_unit(unit)).payload)
    await runner.close()
    assert found.info["model_version"] == version


async def test_numbers_of_numpy_and_torch_are_metrics_too() -> None:
    class Mine(Workflow):
        def run(self) -> list[Experience]:
            [experience] = self.model.chat([])
            experience.reward = torch.tensor(0.5)  # type: ignore[assignment]  # as users do
            experience.metrics = {"f1": np.float32(0.25), "hit": torch.tensor(True), "kind": "x"}
            return [experience]

    result = await result_of(Mine)
    [metrics] = result.metrics
    assert metrics.pop("time/run_execution") >= 0
    assert metrics == {"f1": 0.25, "hit": 1.0, "reward": 0.5}
