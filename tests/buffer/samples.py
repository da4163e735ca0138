"""Small experiences for tests."""

import torch

from trinity.common.experience import EID, Experience


def experience(
    task: int | str = 0,
    run: int = 0,
    *,
    batch: int = 1,
    reward: float | None = 1.0,
    version: int | None = 0,
    num_tokens: int = 6,
    **fields: object,
) -> Experience:
    info = {} if version is None else {"model_version": version}
    info |= fields.pop("info", {})  # type: ignore[operator]
    length = num_tokens - 2
    return Experience(
        eid=EID(batch, task, run),
        tokens=torch.arange(num_tokens),
        prompt_length=2,
        logprobs=torch.full((length,), -0.5),
        reward=reward,
        info=info,
        prompt_text="question",
        response_text=f"answer {task}",
        **fields,  # type: ignore[arg-type]
    )


def group(count: int, **fields: object) -> list[Experience]:
    """``count`` experiences of as many tasks."""
    return [experience(task, **fields) for task in range(count)]  # type: ignore[arg-type]


def tasks_of(experiences: list[Experience] | None) -> list[int | str]:
    return [e.eid.task for e in experiences or []]
