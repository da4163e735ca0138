"""The agent program for `verifiers` environments that runs in the process of the workflow.

The package's own chat program is started by `uv`, which gets its dependencies from the network
for every box; this one asks the same endpoint and uses the same tool servers without that. It is
imported only where `verifiers` is installed.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import AsyncOpenAI
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):
    """Replies and calls tools until a reply comes without a call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        messages = self._messages(data)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            )
            timeout = self.config.tool_timeout
            servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            offered = {"tools": tools} if tools else {}
            while True:
                completion = await client.chat.completions.create(
                    model=ctx.model, messages=messages, **offered
                )
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message.tool_calls:
                    content = await _called(call.function, places, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def _messages(self, data: Any) -> list[Any]:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*messages, {"role": "user", "content": prompt}]
        return [*messages, *(message_to_wire(message) for message in prompt or [])]


async def _called(function: Any, places: dict[str, Any], connections: dict[str, Any]) -> Any:
    """What a tool gives, or what is wrong with the call."""
    if function.name not in places:
        return f"Error: there is no tool {function.name!r}; there are: {', '.join(places)}."
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"Error: the arguments are not JSON ({error})."
    if not isinstance(arguments, dict):
        return "Error: the arguments must be a JSON object."
    return await call_mcp(connections, places, function.name, arguments)
