"""Models and workflows for tests of runner, pool and scheduler. No engine, no process."""

import asyncio
import time

from trinity.common.experience import Experience
from trinity.common.workflows import SimpleWorkflow, Task, Workflow


class EchoModel:
    """Answers with numbers drawn from its seed, one token each."""

    def __init__(self, delay_s=0.0):
        self.delay_s = delay_s
        self.seed = None

    def clone_with_isolated_history(self):
        return EchoModel(self.delay_s)

    def begin_run(self, seed):
        self.seed = seed

    @property
    def model_version_async(self):
        return asyncio.sleep(0, 3)

    async def chat_async(self, messages, n=1, **sampling):
        await asyncio.sleep(self.delay_s)
        return [self._answer(i) for i in range(n)]

    def chat(self, messages, n=1, **sampling):
        time.sleep(self.delay_s)
        return [self._answer(i) for i in range(n)]

    def _answer(self, index):
        token = (self.seed + index * 7919) % 1000
        return Experience(
            tokens=[1, 2, token],
            prompt_length=2,
            logprobs=[-1.0],
            token_versions=[3],
            response_text=str(token),
        )


class Group(SimpleWorkflow):
    default_reward_fn = "exact_match_reward"


class Single(Workflow):
    """One experience a run; behaves as ``raw_task["do"]`` says."""

    is_async = True

    async def run_async(self):
        await misbehave(self.task, asyncio.sleep)
        [answer] = await self.model.chat_async([], n=1)
        answer.reward = 1.0
        return [answer]


class Blocking(Workflow):
    def run(self):
        do = self.task.raw_task.get("do")
        if do == "loop":
            while True:
                pass
        if do == "sleep":
            time.sleep(self.task.raw_task.get("seconds", 3))
        [answer] = self.model.chat([], n=1)
        answer.reward = 1.0
        return [answer]


FAILS: dict[str, int] = {}


async def misbehave(task, sleep):
    do = task.raw_task.get("do")
    if do == "raise":
        raise ValueError("no luck")
    if do == "hang":
        await sleep(1000)
    if do == "slow":
        await sleep(task.raw_task["seconds"])
    if do == "fail_first":
        key = task.raw_task["key"]
        FAILS[key] = FAILS.get(key, 0) + 1
        if FAILS[key] <= task.raw_task["times"]:
            raise ValueError("not yet")


def task(workflow=Group, repeat_times=4, **raw):
    raw = {"prompt": "1+1", "response": "2"} | raw
    return Task(workflow=workflow, raw_task=raw, repeat_times=repeat_times)
