import pytest

from trinity.common.experience import Experience
from trinity.common.models.fake import FakeModel
from trinity.common.workflows import (
    WORKFLOWS,
    MultiTurnWorkflow,
    RewardPropagationWorkflow,
    SimpleWorkflow,
    StepWiseRewardWorkflow,
    Task,
    Workflow,
)


def exact(response, truth):
    return {"accuracy": float(response == truth)}


def make_task(**kw):
    raw = {"prompt": "1+1", "response": "2"}
    return Task(**({"workflow": SimpleWorkflow, "reward_fn": exact, "raw_task": raw} | kw))


def test_task_columns():
    raw = {"q": "why", "a": {"b": 1}, "a.c": 2}
    task = Task(raw_task=raw, format_args={"prompt_key": "q", "response_key": "a.b"})
    assert (task.task_desc, task.truth, task.column("a.c")) == ("why", 1, 2)
    assert task.column("nothing") is None and task.column("a.b.c") is None
    assert task.to_dict() is raw


async def test_simple_workflow_scores_each_answer():
    model = FakeModel(["2", "3"])
    task = make_task(
        format_args={"system_prompt": "Be brief.", "reply_prefix": "So: "},
        rollout_args={"temperature": 0.5, "max_tokens": 9},
    )
    workflow = task.to_workflow(model)
    workflow.set_repeat_times(2, run_id_base=4)
    answers = await workflow.run_async()
    assert [(a.eid.run, a.reward, a.metrics["accuracy"]) for a in answers] == [(4, 1, 1), (5, 0, 0)]
    assert [m["role"] for m in model.calls[0]] == ["system", "user", "assistant"]
    assert model.sampling[0] == {"n": 2, "temperature": 0.5, "top_k": None, "max_tokens": 9} or (
        model.sampling[0]["temperature"] == 0.5 and model.sampling[0]["max_tokens"] == 9
    )


def test_run_and_run_async_are_one():
    assert make_task().to_workflow(FakeModel(["2"])).run()[0].reward == 1


async def test_reset_takes_everything_of_the_new_task():
    model = FakeModel(["2", "x"])
    workflow = make_task(rollout_args={"temperature": 1.0}).to_workflow(model)
    await workflow.run_async()
    other = make_task(
        rollout_args={"temperature": 0.0}, raw_task={"prompt": "x?", "response": "x"}, is_eval=True
    )
    workflow.reset(other)
    [answer] = await workflow.run_async()
    assert answer.reward == 1
    assert model.sampling[1]["temperature"] == 0.0
    assert model.calls[1][0]["content"] == "x?"


async def test_a_prompt_of_messages_is_taken_as_it_is():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    model = FakeModel(["2"])
    task = make_task(
        raw_task={"prompt": messages, "response": "2"}, format_args={"system_prompt": "other"}
    )
    await task.to_workflow(model).run_async()
    assert model.calls[0] == messages


async def test_a_workflow_without_a_reward_says_so():
    with pytest.raises(ValueError, match="default_reward_fn_type"):
        await make_task(reward_fn=None).to_workflow(FakeModel(["2"])).run_async()


def test_which_method_runs():
    class Sync(Workflow):
        def run(self):
            return []

    class Async(Workflow):
        async def run_async(self):
            return []

    class SyncOverAsync(SimpleWorkflow):
        def run(self):
            return []

    class RepeatsAgain(SyncOverAsync):
        can_repeat = True

    class OnlyFlag(SimpleWorkflow):
        can_repeat = False

    assert [c.runs_async() for c in (Sync, Async, SyncOverAsync, SimpleWorkflow)] == [
        False,
        True,
        False,
        True,
    ]
    assert [
        c.repeats_at_once() for c in (SimpleWorkflow, SyncOverAsync, RepeatsAgain, OnlyFlag)
    ] == [
        True,
        False,
        True,
        False,
    ]


async def test_multi_turn_becomes_one_experience():
    class Talk(MultiTurnWorkflow):
        is_async = True

        async def run_async(self):
            messages = [{"role": "user", "content": "a"}]
            for _ in range(2):
                [reply] = await self.model.chat_async(messages)
                messages += [
                    {"role": "assistant", "content": reply.response_text},
                    {"role": "user", "content": "go on"},
                ]
            return [
                await self.process_messages_to_experience_async(
                    messages[:-1], 0.5, {"turns": 2, "note": "x"}
                )
            ]

    [experience] = await make_task(workflow=Talk).to_workflow(FakeModel(["bc", "d"])).run_async()
    sampled = bytes(experience.tokens[experience.prompt_length :][experience.action_mask].tolist())
    assert sampled == b"bc\nd\n"
    assert experience.reward == 0.5 and experience.metrics == {"turns": 2}
    assert experience.info["note"] == "x"


class Climb(StepWiseRewardWorkflow):
    max_step_num = 4

    def step(self, step_num):
        self.model.chat([{"role": "user", "content": f"step {step_num}"}])
        return step_num < 2

    def reward(self, exps, step_num):
        assert len(exps) == 1
        return float(step_num)


class AsyncClimb(RewardPropagationWorkflow):
    async def step_async(self, step_num):
        for _ in range(2):
            await self.model.chat_async([{"role": "user", "content": "x"}])
        return True

    async def reward_async(self, exps):
        return float(len(exps))


def test_steps_are_scored_one_by_one():
    steps = make_task(workflow=Climb).to_workflow(FakeModel(list("abcd"))).run()
    assert [(e.eid.step, e.reward, e.response_text) for e in steps] == [
        (0, 0, "a"),
        (1, 1, "b"),
        (2, 2, "c"),
    ]
    assert all(e.metrics["actual_env_steps"] == 3 for e in steps)


async def test_the_reward_of_the_end_goes_to_every_step():
    task = make_task(workflow=AsyncClimb, workflow_args={"max_step_num": 3})
    assert AsyncClimb.runs_async() and not Climb.runs_async()
    steps = await task.to_workflow(FakeModel(list("abcdef"))).run_async()
    assert [e.eid.step for e in steps] == [0, 0, 1, 1, 2, 2]
    assert {e.reward for e in steps} == {6.0}


def test_a_workflow_of_ten_lines(monkeypatch):
    monkeypatch.setattr(WORKFLOWS, "_loaded", dict(WORKFLOWS._loaded))

    @WORKFLOWS.register_module("shout_workflow_of_a_test")
    class Shout(Workflow):
        is_async = True

        async def run_async(self) -> list[Experience]:
            [answer] = await self.model.chat_async([{"role": "user", "content": "shout"}])
            answer.reward = float(answer.response_text.isupper())
            return [answer]

    task = Task(workflow="shout_workflow_of_a_test")
    assert task.to_workflow(FakeModel(["YES"])).run()[0].reward == 1


def test_every_name_resolves():
    for name in WORKFLOWS.names():
        assert issubclass(WORKFLOWS.get(name), Workflow)
