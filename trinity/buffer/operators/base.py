"""What an operator of the experience pipeline is, and how a list of them is built."""

import inspect
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from trinity.common.config.data_processor import OperatorConfig
from trinity.common.experience import Experience
from trinity.utils.registry import Registry

Processed = tuple[list[Experience], dict[str, Any]]


class Processor(Protocol):
    """Anything with `process`: an `ExperienceOperator`, or a group advantage of an algorithm."""

    def process(self, exps: list[Experience]) -> Processed | Awaitable[Processed]: ...


class ExperienceOperator:
    """Base of operators: experiences of one step in, what becomes of them and metrics out.

    `process` may also be a coroutine. `prepare` is called before the first step, `close` after
    the last; all may be coroutines too. A step may take `synchronizer.sync_timeout`.
    """

    auxiliary_models: Mapping[str | int, Sequence[Any]] = MappingProxyType({})
    """Async OpenAI clients of `explorer.auxiliary_models`, by name and by position, from the first
    `process` on: ``self.auxiliary_models["judge"][0]``."""

    def prepare(self) -> Awaitable[None] | None:
        """Get ready: connect, load."""
        return None

    def process(self, exps: list[Experience]) -> Processed | Awaitable[Processed]:
        """The experiences to go on with, and metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no process()")

    def close(self) -> Awaitable[None] | None:
        """Let go of what `prepare` took."""
        return None

    def set_auxiliary_models(self, models: Mapping[str | int, Sequence[Any]]) -> None:
        """Take the clients of the auxiliary models, to be asked in `process`."""
        self.auxiliary_models = models


class ExperienceOperatorV1(ExperienceOperator):
    """The same base under the name of operators written with coroutines."""


_HOME = "trinity.buffer.operators"
EXPERIENCE_OPERATORS: Registry[type[ExperienceOperator]] = Registry(
    "experience operator",
    {
        "reward_filter": f"{_HOME}.filters.RewardFilter",
        "reward_std_filter": f"{_HOME}.filters.RewardSTDFilter",
        "invalid_reward_filter": f"{_HOME}.filters.InvalidRewardFilter",
        "dapo_dynamic_sampling": f"{_HOME}.filters.DapoDynamicSampling",
        "mask_response_truncated": f"{_HOME}.mappers.MaskResponseTruncated",
        "reward_shaping_mapper": f"{_HOME}.mappers.RewardShapingMapper",
        "pass_rate_calculator": f"{_HOME}.pass_rate.PassRateCalculator",
        "data_juicer": "trinity.service.data_juicer.operator.DataJuicerOperator",
    },
)


def create_operators(
    configs: Sequence[OperatorConfig],
    auxiliary_models: Mapping[str | int, Sequence[Any]] | None = None,
) -> list[ExperienceOperator]:
    """The operators of a config, in order.

    Raises:
        UnknownNameError: There is none of that name.
        ValueError: An operator doesn't take one of its arguments.
    """
    return [_create(config, auxiliary_models or {}) for config in configs]


def _create(
    config: OperatorConfig, models: Mapping[str | int, Sequence[Any]]
) -> ExperienceOperator:
    kind = EXPERIENCE_OPERATORS.get(config.name)
    try:
        operator = kind(**config.args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ValueError(f"The operator {config.name!r}: {error}. It takes: {takes}.") from None
    operator.set_auxiliary_models(models)
    return operator
