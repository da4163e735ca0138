"""A workflow and a judge as AgentScope's tuner wants them; nothing of trinity is imported."""

from agentscope.message import UserMsg


async def solve(task, model):
    question = f"{task['question']} Answer with the number alone."
    reply = await model([UserMsg(name="user", content=question)])
    text = "".join(block.text for block in reply.content if hasattr(block, "text"))
    return {"response": text, "metrics": {"answer_length": len(text)}}


def judge(task, response):
    return {"reward": float(task["answer"] in response)}
