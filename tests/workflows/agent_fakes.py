"""A scripted model behind the face of an OpenAI client, recording like the real one."""

import json

from openai.types.chat import ChatCompletion

from trinity.common.experience import Experience
from trinity.common.models.fake import FakeModel


class AgentModel(FakeModel):
    """Replies are texts, or lists of (tool name, arguments) to call at once.

    Token ids are bytes; a prompt that goes on from an earlier reply begins with its ids.
    """

    def __init__(self, replies, **kw):
        super().__init__([], **kw)
        self._script = list(replies)
        self.requests = []

    def clone_with_isolated_history(self):
        clone = AgentModel([], version=self._version)
        clone._script, clone.requests = self._script, self.requests
        return clone

    def get_openai_async_client(self):
        return _Client(self)

    async def create(self, *, messages, model, tools=None, **sampling):
        assert model == self.model_name
        self.requests.append({"messages": [dict(m) for m in messages], "tools": tools, **sampling})
        reply = self._script.pop(0)
        calls = reply if isinstance(reply, list) else []
        message = {"role": "assistant", "content": None if calls else reply}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{i}",
                    "type": "function",
                    "function": {"name": name, "arguments": json.dumps(arguments)},
                }
                for i, (name, arguments) in enumerate(calls)
            ]
        prompt = "".join(_line(m) for m in messages).encode()
        ids = _line(message).encode()
        self._history.append(
            Experience(
                tokens=[*prompt, *ids],
                prompt_length=len(prompt),
                logprobs=[-1.0] * len(ids),
                token_versions=[self._version] * len(ids),
                response_text=message["content"] or "",
                info={"model_version": self._version},
            )
        )
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return ChatCompletion.model_validate(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": model,
                "choices": [choice],
            }
        )


def _line(message):
    calls = [call["function"] for call in message.get("tool_calls") or []]
    said = message.get("content") or json.dumps(calls, sort_keys=True)
    return f"<{message['role']}>{said}\n"


class _Client:
    def __init__(self, model):
        self.chat = self
        self.completions = self
        self.create = model.create
