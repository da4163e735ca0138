"""`TrinityClient`: talks to a run in mode `serve` from a program of the user's."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity.utils.refusal import reason_of
from trinity.utils.threads import run_sync

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_TIMEOUT_S = 30.0


class TrinityClient:
    """Every method that waits has an ``_async`` twin.

    Args:
        proxy_url: As ``<job>/explorer_server_url.txt`` has it.
        api_key: None: the one in ``TRINITY_API_KEY``.
    """

    def __init__(self, proxy_url: str, api_key: str | None = None) -> None:
        self._url = proxy_url.rstrip("/").removesuffix("/v1")
        self._key = api_key or os.environ.get("TRINITY_API_KEY", "")

    def get_openai_client(self) -> "OpenAI":
        """A client of the `openai` package. A reply's ``id`` is what `feedback` wants."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self._url}/v1", api_key=self._key)

    def get_openai_async_client(self) -> "AsyncOpenAI":
        """`get_openai_client` for async code."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self._url}/v1", api_key=self._key)

    async def alive_async(self) -> bool:
        """Whether the service answers, and takes the key."""
        import httpx

        try:
            await self._ask("GET", "/health")
        except httpx.HTTPError:
            return False
        return True

    async def feedback_async(
        self, reward: float, msg_ids: Sequence[str], task_id: str, run_id: int | None = None
    ) -> int:
        """Reward replies as the steps of one run of a task; how many experiences they are.

        Raises:
            httpx.HTTPStatusError: 404: a reply is unknown, forgotten or trained already.
        """
        told = {"reward": reward, "msg_ids": list(msg_ids), "task_id": task_id, "run_id": run_id}
        return int((await self._ask("POST", "/feedback", told))["experiences"])

    async def commit_async(self) -> int:
        """Train on all that has feedback; how many experiences that is."""
        return int((await self._ask("POST", "/commit"))["experiences"])

    async def get_metrics_async(self) -> dict[str, float]:
        """How the service stands: steps, engines, replies, experiences."""
        return await self._ask("GET", "/status")

    def alive(self) -> bool:
        """`alive_async` for a program that is not async."""
        return run_sync(self.alive_async())

    def feedback(
        self, reward: float, msg_ids: Sequence[str], task_id: str, run_id: int | None = None
    ) -> int:
        """`feedback_async` for a program that is not async."""
        return run_sync(self.feedback_async(reward, msg_ids, task_id, run_id))

    def commit(self) -> int:
        """`commit_async` for a program that is not async."""
        return run_sync(self.commit_async())

    def get_metrics(self) -> dict[str, float]:
        """`get_metrics_async` for a program that is not async."""
        return run_sync(self.get_metrics_async())

    async def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers) as client:
            answer = await client.request(method, f"{self._url}{path}", json=body)
        if answer.is_error:
            text = f"{method} {path}: {answer.status_code}. {reason_of(answer.text)}"
            raise httpx.HTTPStatusError(text, request=answer.request, response=answer)
        found: dict[str, Any] = answer.json()
        return found
