"""`trinity new`: a plugin file to start from, and a test of it that passes."""

import keyword
import re
from pathlib import Path

from trinity.common.errors import TrinityError

KINDS = ("workflow", "reward", "algorithm", "operator")

_WORKFLOW = '''\
"""The workflow `{name}`: what the model is asked, and what its answers are worth."""

from trinity.common.experience import Experience
from trinity.common.workflows import WORKFLOWS, Workflow


@WORKFLOWS.register_module("{name}")
class {camel}Workflow(Workflow):
    """One question, one answer; 1 if the answer holds the truth.

    Runs once for each of the task's repeats. ``self.logger`` writes to the runner's log.
    """

    is_async = True

    async def run_async(self) -> list[Experience]:
        messages = [{{"role": "user", "content": self.task.task_desc}}]
        [answer] = await self.model.chat_async(messages, n=1, **self.rollout_args)
        answer.reward = float(str(self.task.truth) in answer.response_text)
        answer.metrics["accuracy"] = answer.reward
        return [answer]
'''

_WORKFLOW_TEST = '''\
"""Without a model: replies are scripted. Try a real one with `trinity debug`."""

from pathlib import Path

from trinity.common.models.fake import FakeModel
from trinity.common.workflows import Task
from trinity.utils.plugins import load_plugins

load_plugins([Path(__file__).parent])


def run(reply: str) -> float:
    task = Task(workflow="{name}", raw_task={{"prompt": "6 * 7 = ?", "response": "42"}})
    [answer] = task.to_workflow(FakeModel([reply])).run()
    return answer.reward


def test_right_and_wrong_answers():
    assert run("It is 42.") == 1
    assert run("It is 41.") == 0
'''

_REWARD = '''\
"""The reward `{name}`: what a response is worth."""

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn


@REWARD_FUNCTIONS.register_module("{name}")
class {camel}Reward(RewardFn):
    """``accuracy`` for holding the truth, ``brevity`` for few words.

    Arguments of ``__init__`` are set by `reward_fn_args`. ``__call__`` names what it wants to see:
    response, truth, prompt, messages, tokens, truncation, task, metadata. It may be async. An
    error is never a score: `reward_fn_args.on_error` says what becomes of the sample.
    """

    def __init__(self, max_words: int = 50) -> None:
        self.max_words = max_words

    def __call__(self, response: str, truth: str) -> dict[str, float]:
        return {{
            "accuracy": float(str(truth) in response),
            "brevity": 0.1 if len(response.split()) <= self.max_words else 0.0,
        }}
'''

_REWARD_TEST = '''\
"""The reward as a run calls it: by its name, with settings, weights and a deadline."""

import asyncio
from pathlib import Path

from trinity.common.rewards import make_scorer
from trinity.utils.plugins import load_plugins

load_plugins([Path(__file__).parent])


def test_parts_of_the_reward():
    scorer = make_scorer("{name}", {{"max_words": 3, "weights": {{"brevity": 2.0}}}})
    short = asyncio.run(scorer.score(response="it is 42", truth="42"))
    assert short == {{"accuracy": 1.0, "brevity": 0.2}}
    long = asyncio.run(scorer.score(response="well it is 41", truth="42"))
    assert long == {{"accuracy": 0.0, "brevity": 0.0}}
'''

_ALGORITHM = '''\
"""The algorithm `{name}`: a policy loss, and what it is used with."""

from torch import Tensor

from trinity.algorithm import ALGORITHM_TYPE, POLICY_LOSS_FN, AlgorithmType, PolicyLossFn
from trinity.algorithm.aggregate import aggregate_loss, as_metric
from trinity.algorithm.utils import log_ratio, visible


@POLICY_LOSS_FN.register_module("{name}")
class {camel}Loss(PolicyLossFn):
    """``-A * ratio``, the ratio cut at ``max_ratio``.

    Arguments of ``__init__`` are set by `algorithm.policy_loss_fn_args`. Tensors are [B, T];
    ``__call__`` gets those that it names.
    """

    def __init__(self, max_ratio: float = 2.0, loss_agg_mode: str = "token-mean") -> None:
        self.max_ratio = max_ratio
        self.loss_agg_mode = loss_agg_mode

    def __call__(
        self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        logprob, old_logprob, advantages = visible(action_mask, logprob, old_logprob, advantages)
        ratio = log_ratio(logprob, old_logprob).exp().clamp(max=self.max_ratio)
        loss = aggregate_loss(-advantages * ratio, action_mask, self.loss_agg_mode)
        return loss, {{"{name}_loss": as_metric(loss, action_mask)}}


@ALGORITHM_TYPE.register_module("{name}")
class {camel}(AlgorithmType, table="grpo"):
    """GRPO with this loss."""

    @classmethod
    def default_config(cls) -> dict[str, object]:
        return {{**super().default_config(), "policy_loss_fn": "{name}"}}
'''

_ALGORITHM_TEST = '''\
"""The loss against a number worked out by hand."""

from pathlib import Path

import pytest
import torch

from trinity.algorithm import ALGORITHM_TYPE, POLICY_LOSS_FN
from trinity.utils.plugins import load_plugins

load_plugins([Path(__file__).parent])


def test_the_loss_of_three_tokens():
    loss_fn = POLICY_LOSS_FN.get("{name}")()
    logprob = torch.log(torch.tensor([[0.5, 0.4, 0.9]]))
    old_logprob = torch.log(torch.tensor([[0.5, 0.1, 0.9]]))
    advantages = torch.tensor([[1.0, 2.0, 5.0]])
    mask = torch.tensor([[True, True, False]])
    loss, metrics = loss_fn(logprob, old_logprob, mask, advantages)
    assert loss.item() == pytest.approx(-(1 * 1 + 2 * 2) / 2)  # ratios 1 and 4, the latter cut


def test_the_algorithm_uses_it():
    assert ALGORITHM_TYPE.get("{name}").default_config()["policy_loss_fn"] == "{name}"
'''

_OPERATOR = '''\
"""The operator `{name}`: what happens to experiences before they are trained on."""

from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperator
from trinity.common.experience import Experience


@EXPERIENCE_OPERATORS.register_module("{name}")
class {camel}Operator(ExperienceOperator):
    """Leaves out responses of more than ``max_tokens`` tokens.

    Arguments of ``__init__`` are the operator's ``args`` in
    `data_processor.experience_pipeline.operators`.
    """

    def __init__(self, max_tokens: int = 1000) -> None:
        self.max_tokens = max_tokens

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        kept = [e for e in exps if e.response_length <= self.max_tokens]
        return kept, {{"too_long_count": len(exps) - len(kept)}}
'''

_OPERATOR_TEST = '''\
"""The operator on two experiences."""

from pathlib import Path

from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.common.experience import Experience
from trinity.utils.plugins import load_plugins

load_plugins([Path(__file__).parent])


def test_long_responses_are_left_out():
    operator = EXPERIENCE_OPERATORS.get("{name}")(max_tokens=2)
    short = Experience(tokens=[1, 2, 3], prompt_length=1)
    long = Experience(tokens=[1, 2, 3, 4], prompt_length=1)
    assert operator.process([short, long]) == ([short], {{"too_long_count": 1}})
'''

_TEMPLATES = {
    "workflow": (_WORKFLOW, _WORKFLOW_TEST),
    "reward": (_REWARD, _REWARD_TEST),
    "algorithm": (_ALGORITHM, _ALGORITHM_TEST),
    "operator": (_OPERATOR, _OPERATOR_TEST),
}
_USE = {
    "workflow": "buffer.explorer_input.default_workflow_type: {name}",
    "reward": "buffer.explorer_input.default_reward_fn_type: {name}",
    "algorithm": "algorithm.algorithm_type: {name}",
    "operator": "data_processor.experience_pipeline.operators: [{{name: {name}}}]",
}


class ScaffoldError(TrinityError):
    """A plugin can't be written."""

    exit_code = 2


def write_plugin(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """Write ``<folder>/<name>.py`` and ``test_<name>.py``; their paths.

    Raises:
        ScaffoldError: Unknown kind, a name Python can't import, or a file that is there.
    """
    if kind not in KINDS:
        raise ScaffoldError(f"There is no {kind!r} to make; use {', '.join(KINDS)}.")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ScaffoldError(
            f"{name!r} can't be the name: use small letters, digits and underscores."
        )
    camel = "".join(part.capitalize() for part in name.split("_"))
    paths = (folder / f"{name}.py", folder / f"test_{name}.py")
    for path in paths:
        if path.exists():
            raise ScaffoldError(f"{path} exists already; choose another name or folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in zip(paths, _TEMPLATES[kind], strict=True):
        path.write_text(template.format(name=name, camel=camel))
    return paths


def how_to_use(kind: str, name: str) -> str:
    """The line of a configuration that names the plugin."""
    return _USE[kind].format(name=name)
