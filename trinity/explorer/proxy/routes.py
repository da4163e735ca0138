"""The routes that mode `serve` adds to OpenAI's: `/feedback`, `/commit`, `/status`."""

import math
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, Field, field_validator

from trinity.explorer.proxy.desk import Desk, UnknownReplyError


class Feedback(BaseModel):
    """What a reply, or a chain of them, was worth."""

    reward: float
    msg_ids: list[str] = Field(min_length=1)
    task_id: str = Field(min_length=1)
    run_id: int | None = Field(None, ge=0)

    @field_validator("reward")
    @classmethod
    def _is_a_number(cls, value: float) -> float:
        if not math.isfinite(value):
            raise ValueError("must be a finite number")
        return value


def feedback_routes(
    desk: Desk, status: Callable[[], Awaitable[dict[str, object]]], check: Callable[[Request], None]
) -> APIRouter:
    """The routes over ``desk``.

    Args:
        status: How the service stands.
        check: Refuses requests without the key.
    """

    def allowed(request: Request) -> None:
        check(request)

    router = APIRouter(dependencies=[Depends(allowed)])

    @router.post("/feedback")
    async def give(feedback: Feedback) -> dict[str, object]:
        try:
            count = desk.feedback(**feedback.model_dump())
        except UnknownReplyError as error:
            text = f"No reply {error.args[0]!r} waits for feedback: unknown, forgotten or trained."
            raise HTTPException(404, text) from error
        return {"experiences": count}

    @router.post("/commit")
    async def commit() -> dict[str, object]:
        return {"experiences": desk.commit()}

    @router.get("/status")
    async def show() -> dict[str, object]:
        return await status() | desk.counts()

    return router
