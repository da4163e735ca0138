"""Calls a reward: with the arguments it names, a deadline, retries, and a rule for its errors."""

import asyncio
import inspect
import math
import reprlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from trinity.common.errors import TrinityError
from trinity.common.rewards.base import REWARD_FUNCTIONS, RewardFn, RewardFunction
from trinity.utils.isolate import ProcessPool
from trinity.utils.threads import CallTimeout, shared_threads

#: What a reward may name in its signature, beside ``**kwargs``.
ARGUMENTS = frozenset(
    {
        "response",
        "truth",
        "ground_truth",
        "prompt",
        "messages",
        "tokens",
        "response_token",
        "truncation",
        "truncate_status",
        "task",
        "metadata",
        "raw_task",
        "experience",
    }
)
_QUICK_S = 0.001


class RewardError(TrinityError):
    """A response could not be scored. ``is_fatal``: the run is to end with it."""

    def __init__(self, message: str, is_fatal: bool = False) -> None:
        super().__init__(message, is_fatal)
        self.message, self.is_fatal = message, is_fatal

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class RewardPolicy:
    """How a reward is called, and what its failure does. Part of `reward_fn_args`.

    Args:
        on_error: ``drop`` leaves the sample out; ``retry`` calls again, ``max_retries`` times,
            then leaves it out; ``raise`` ends the run with the error.
        timeout_s: Seconds one call may take.
        max_retries: Further calls with ``retry``.
        retry_wait_s: Seconds before the first further call; doubles with each.
        weights: Factor of each named part; parts without one count once.
    """

    on_error: Literal["drop", "retry", "raise"] = "drop"
    timeout_s: float = 60.0
    max_retries: int = 2
    retry_wait_s: float = 0.1
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_error not in ("drop", "retry", "raise"):
            raise ValueError(
                f"reward_fn_args.on_error is {self.on_error!r}; use 'drop', 'retry' or 'raise'."
            )
        if self.timeout_s <= 0:
            raise ValueError(f"reward_fn_args.timeout_s is {self.timeout_s}; it must be above 0.")

    @classmethod
    def split(cls, reward_fn_args: Mapping[str, Any]) -> tuple["RewardPolicy", dict[str, Any]]:
        """The policy among ``reward_fn_args``, and what is left for the reward itself."""
        own = {f.name for f in fields(cls)}
        policy = {name: value for name, value in reward_fn_args.items() if name in own}
        rest = {name: value for name, value in reward_fn_args.items() if name not in own}
        return cls(**policy), rest


class Scorer:
    """A reward function with its policy.

    >>> await Scorer(MyReward()).score(response="4", truth="4")
    {'accuracy': 1.0}
    """

    def __init__(self, reward_fn: RewardFunction, policy: RewardPolicy | None = None) -> None:
        self.reward_fn = reward_fn
        self.policy = policy or RewardPolicy()
        self._wanted = wanted_arguments(reward_fn)
        self._is_async = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(
            type(reward_fn).__call__
        )

    async def score(self, **arguments: object) -> dict[str, float]:
        """Weighted parts of the reward; the reward is their sum.

        Raises:
            RewardError: No score after all attempts. Says which reward, why, and on which text.
        """
        [outcome] = await self.score_all([arguments])
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome

    async def score_all(
        self, samples: Sequence[Mapping[str, object]]
    ) -> list[dict[str, float] | RewardError]:
        """`score` of several samples side by side; an error takes the place of its sample."""
        wanted = [self._pick(sample) for sample in samples]
        if len(samples) > 1 and self._is_quick():
            firsts = await self._call_in_turn(wanted)
        else:
            firsts = await asyncio.gather(*map(self._attempt, wanted))
        if all(isinstance(first, dict) for first in firsts):
            return cast("list[dict[str, float] | RewardError]", firsts)
        return await asyncio.gather(*map(self._settle, samples, wanted, firsts))

    async def _settle(
        self,
        sample: Mapping[str, object],
        wanted: Mapping[str, object],
        outcome: dict[str, float] | Exception,
    ) -> dict[str, float] | RewardError:
        """The outcome after the further attempts that the policy allows."""
        attempts = 1 + (self.policy.max_retries if self.policy.on_error == "retry" else 0)
        for attempt in range(1, attempts):
            if isinstance(outcome, dict):
                return outcome
            await asyncio.sleep(self.policy.retry_wait_s * 2 ** (attempt - 1))
            outcome = await self._attempt(wanted)
        if isinstance(outcome, dict):
            return outcome
        error = RewardError(
            f"{_name(self.reward_fn)}: {_reason(outcome)} (attempts: {attempts}), on response "
            f"{_SHORT.repr(sample.get('response'))}",
            is_fatal=self.policy.on_error == "raise",
        )
        error.__cause__ = outcome
        return error

    def _is_quick(self) -> bool:
        """Whether calls are so short that a thread for each costs more than they do."""
        is_blocking = not self._is_async and not getattr(self.reward_fn, "is_isolated", False)
        return is_blocking and _SECONDS.get(_kind(self.reward_fn), 1.0) < _QUICK_S

    async def _call_in_turn(
        self, samples: Sequence[Mapping[str, object]]
    ) -> list[dict[str, float] | Exception]:
        """First attempts at all samples in one thread; from one that hangs on, each in its own."""
        results: list[object] = []

        def call_all() -> None:
            for wanted in samples:
                try:
                    results.append(self._call_here(wanted))
                except Exception as error:  # a user's reward: recorded, never a score
                    results.append(error)

        late: list[dict[str, float] | Exception] = []
        try:
            await shared_threads().run(call_all, self.policy.timeout_s)
        except CallTimeout as error:
            late.append(error)
        outcomes = [await self._finished(result) for result in results[: len(samples)]] + late
        left = samples[len(outcomes) :]
        return outcomes + await asyncio.gather(*map(self._attempt, left))

    async def _attempt(self, wanted: Mapping[str, object]) -> dict[str, float] | Exception:
        try:
            return self._checked(await self._call(wanted))
        except Exception as error:  # a user's reward: recorded, never a score
            return error

    async def _finished(self, result: object) -> dict[str, float] | Exception:
        try:
            return self._checked(await self._awaited(result))
        except Exception as error:  # a user's reward: recorded, never a score
            return error

    def _checked(self, result: object) -> dict[str, float] | Exception:
        if isinstance(result, Exception):
            return result
        try:
            return self._weighted(result)
        except Exception as error:  # a user's reward: recorded, never a score
            return error

    def _pick(self, arguments: Mapping[str, object]) -> Mapping[str, object]:
        if self._wanted is None:
            return arguments
        return {name: value for name, value in arguments.items() if name in self._wanted}

    async def _call(self, wanted: Mapping[str, object]) -> object:
        timeout_s = self.policy.timeout_s
        if self._is_async:
            async with asyncio.timeout(timeout_s):
                return await self.reward_fn(**wanted)  # type: ignore[misc]  # async by _is_async
        if getattr(self.reward_fn, "is_isolated", False):
            quick = self.reward_fn.quick(**wanted)  # type: ignore[attr-defined]  # a RewardFn
            if quick is not None:
                return quick
            return await _processes().run(self.reward_fn, dict(wanted), timeout_s)
        called = shared_threads().run(lambda: self._call_here(wanted), timeout_s)
        return await self._awaited(await called)

    async def _awaited(self, result: object) -> object:
        """What a call gave, or what that gives if it is to be awaited."""
        if not inspect.isawaitable(result):
            return result
        async with asyncio.timeout(self.policy.timeout_s):
            return await result

    def _call_here(self, wanted: Mapping[str, object]) -> object:
        start = time.perf_counter()
        result = self.reward_fn(**wanted)
        is_done = not inspect.isawaitable(result)
        _note_seconds(self.reward_fn, time.perf_counter() - start if is_done else math.inf)
        return result

    def _weighted(self, result: object) -> dict[str, float]:
        parts = result if isinstance(result, Mapping) else {"reward": result}
        weighted: dict[str, float] = {}
        for name, value in parts.items():
            number = _number(value)
            if number is None:
                raise TypeError(
                    f"part {name!r} is {value!r}; a reward returns numbers that are finite"
                )
            weighted[str(name)] = number * self.policy.weights.get(name, 1.0)
        if not weighted:
            raise TypeError("it returned no parts; a reward returns at least one number")
        return weighted


def make_scorer(
    reward_fn: "str | type[RewardFn] | RewardFunction", reward_fn_args: Mapping[str, Any]
) -> Scorer:
    """The scorer of a reward given by name, class or function, with its `reward_fn_args`.

    Raises:
        ValueError, TypeError: It is no reward, does not take these settings, or asks for an
            argument that no workflow passes.
    """
    entry: object = REWARD_FUNCTIONS.get(reward_fn) if isinstance(reward_fn, str) else reward_fn
    policy, settings = RewardPolicy.split(reward_fn_args)
    if isinstance(entry, type):
        if not issubclass(entry, RewardFn):
            raise ValueError(f"{entry.__qualname__} is no reward: derive it from RewardFn.")
        entry = _instance(entry, settings)
    elif not callable(entry):
        raise ValueError(f"{entry!r} is no reward: give a RewardFn class or a function.")
    elif settings:
        raise TypeError(f"{_name(entry)} is a function: it takes no settings, but got {settings}.")
    scorer = Scorer(entry, policy)
    unknown = sorted((wanted_arguments(entry, required_only=True) or frozenset()) - ARGUMENTS)
    if unknown:
        raise TypeError(
            f"The reward {_name(entry)} asks for {', '.join(map(repr, unknown))}, which no workflow"
            f" passes. It may ask for: {', '.join(sorted(ARGUMENTS))}."
        )
    return scorer


def wanted_arguments(
    reward_fn: Callable[..., object], required_only: bool = False
) -> frozenset[str] | None:
    """Names a reward takes; None if it takes all (``**kwargs``)."""
    parameters = inspect.signature(reward_fn).parameters.values()
    if not required_only and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return frozenset(p.name for p in named if not required_only or p.default is p.empty)


def _instance(entry: type[RewardFn], settings: dict[str, Any]) -> RewardFn:
    try:
        return entry(**settings)
    except TypeError as error:
        raise TypeError(f"reward_fn_args do not fit {entry.__qualname__}: {error}") from error


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]  # checked by trying
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, str) else None


def _reason(error: Exception) -> str:
    text = str(error) or "no message"
    return text if isinstance(error, TimeoutError) else f"{type(error).__name__}: {text}"


def _name(reward_fn: object) -> str:
    return getattr(reward_fn, "__qualname__", type(reward_fn).__qualname__)


def _kind(reward_fn: object) -> object:
    return reward_fn if inspect.isroutine(reward_fn) else type(reward_fn)


def _note_seconds(reward_fn: object, seconds: float) -> None:
    kind = _kind(reward_fn)
    _SECONDS[kind] = 0.8 * _SECONDS.get(kind, seconds) + 0.2 * seconds


#: Reward class or function -> running mean of the seconds of a call.
_SECONDS: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()

_SHORT = reprlib.Repr()
_SHORT.maxstring = 300

_PROCESSES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ProcessPool]
_PROCESSES = weakref.WeakKeyDictionary()


def _processes() -> ProcessPool:
    """The child processes of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _PROCESSES:
        _PROCESSES[loop] = ProcessPool()
    return _PROCESSES[loop]
