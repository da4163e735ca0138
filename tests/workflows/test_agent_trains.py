"""An agent that knows nothing of trinity: its sampled ids, and no others, make the gradient."""

import json

import pytest
import torch

from tests.common.models.toy import model_folder
from tests.trainer.toy import plain_model
from tests.workflows.test_real_wrapper import call, run, sampled, wrapper
from trinity.common.workflows import WORKFLOWS
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.workflows.agent.react import AgentWorkflow

TURN = "let me see\n" + "\n".join(call("weather", city=city) for city in ("Oslo", "Rome"))
REPLIES = [TURN] * 7 + ["so \\boxed{42}"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


async def outside_agent(question: str, base_url: str, api_key: str, model: str) -> str:
    """As its author wrote it, for the `openai` package."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": question}]
    for _ in range(8):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content
        for tool_call in message.tool_calls:
            city = json.loads(tool_call.function.arguments)["city"]
            messages.append(
                {"role": "tool", "tool_call_id": tool_call.id, "content": f"{city}: rain"}
            )
    return ""


@WORKFLOWS.register_module("outside_agent_of_a_test")
class OutsideAgent(AgentWorkflow):
    async def solve(self) -> str:
        address = f"{self.model.api_address}/v1"
        return await outside_agent(
            self.task_desc, address, self.model.api_key, self.model.model_name
        )


async def rollout(workflow, **arguments):
    model, ids = wrapper(REPLIES, tool_call_parser="hermes", enable_auto_tool_choice=True)
    rows, _ = await run(model, workflow=workflow, workflow_args=arguments)
    return rows, ids


async def assert_gradient_is_of(rows, ids, folder):
    """The step's gradient is that of the mean log-probability of ``ids``, worked out by hand."""
    assert [token for row in rows for token in sampled(row)] == [t for reply in ids for t in reply]
    settings = TorchEngineSettings(
        folder, dtype="float32", optimizer=OptimizerSettings(lr=1e-3, clip_grad=1e9)
    )
    engine = TorchTrainEngine(settings)
    await engine.prepare()
    await engine.forward_backward(TrainBatch.from_experiences(rows), Objective.from_names("sft"))
    masters = engine._trained("actor").optimizer.weights.masters
    found = {name: master.grad.clone() for name, master in masters.items()}
    before = {name: master.detach().clone() for name, master in masters.items()}
    await engine.optim_step()
    moved = [name for name, master in masters.items() if not torch.equal(master, before[name])]
    await engine.close()
    model = plain_model(folder)
    logprobs = []
    for row in rows:
        log_p = model(row.tokens.long()[None]).logits[0, :-1].log_softmax(-1)
        on = row.action_mask.nonzero().flatten() + row.prompt_length
        logprobs.append(log_p[on - 1, row.tokens[on].long()])
    (-torch.cat(logprobs).mean()).backward()
    for name, parameter in model.named_parameters():
        scale = max(float(parameter.grad.abs().max()), 1e-3)
        assert float((found[name] - parameter.grad).abs().max()) < 1e-5 * scale, name
    assert len(moved) == len(found)


async def test_an_outside_agent_with_parallel_calls_over_eight_turns(tmp_path):
    pytest.importorskip("openai")
    rows, ids = await rollout("outside_agent_of_a_test")
    assert len(rows) == 1 and rows[0].reward == 1 and rows[0].metrics["turns"] == 8
    await assert_gradient_is_of(rows, ids, model_folder(tmp_path, "qwen25"))


async def test_an_agentscope_agent_over_eight_turns(tmp_path):
    pytest.importorskip("agentscope")
    tools = ["tests.workflows.test_agents.weather"]
    rows, ids = await rollout("as_react_workflow", tools=tools)
    assert all(row.reward == 1 for row in rows)
    await assert_gradient_is_of(rows, ids, model_folder(tmp_path, "qwen25"))
