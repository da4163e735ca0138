"""What an algorithm is: which methods it combines, what it needs, where it may run."""

from typing import TYPE_CHECKING, Any, ClassVar

from trinity.common.config.algorithm_table import ALGORITHMS

if TYPE_CHECKING:
    from trinity.common.config import Config

_METHODS = (
    "repeat_times",
    "sample_strategy",
    "advantage_fn",
    "policy_loss_fn",
    "kl_penalty_fn",
    "kl_loss_fn",
    "entropy_loss_fn",
    "loss_agg_mode",
)
_NEEDS = (
    "use_critic",
    "use_reference",
    "compute_advantage_in_trainer",
    "can_balance_batch",
    "schema",
    "modes",
    "min_repeat_times",
)


class _Constant(type):
    """Class attributes that are set once: an algorithm is the same for every part of a run."""

    def __setattr__(cls, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{cls.__name__}.{name} is constant: subclass it to change it.")
        super().__setattr__(name, value)


class AlgorithmType(metaclass=_Constant):
    """An algorithm, by its parts. Its settings are data of `trinity.common.config`.

    A built-in one is `class GRPO(AlgorithmType, table="grpo")`: its attributes are the row of the
    table. A plugin's own sets the attributes and `default_config` itself, or names a row to start
    from, and registers as one of `trinity.algorithm.ALGORITHM_TYPE`.
    """

    use_critic: ClassVar[bool] = False
    """Whether a value model is trained beside the policy."""

    use_reference: ClassVar[bool] = False
    """Whether a reference model may be needed: if the KL in force is not ``none``."""

    compute_advantage_in_trainer: ClassVar[bool] = False
    """Whether advantages need what only the trainer has; else the explorer computes them."""

    can_balance_batch: ClassVar[bool] = True
    """Whether rows may be dealt to ranks by length."""

    schema: ClassVar[str] = "experience"
    """What a row of its data is: ``experience``, ``sft``, ``cpt`` or ``dpo``."""

    modes: ClassVar[tuple[str, ...]] = ("both", "explore", "train")
    """Modes it runs in."""

    min_repeat_times: ClassVar[int] = 1
    """Samples of a task that it needs at least."""

    family: ClassVar[str] = ""
    """Kind of method, for the table of algorithms."""

    formula: ClassVar[str] = ""
    """Advantage and loss in one line of LaTeX-free text."""

    paper: ClassVar[str] = ""
    """Where it comes from."""

    when: ClassVar[str] = ""
    """When to use it."""

    _name: ClassVar[str] = ""
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, table: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if table is None:
            return
        row = ALGORITHMS[table]
        for name in _NEEDS:
            if name not in cls.__dict__:
                type.__setattr__(cls, name, getattr(row, name))
        cls._name = table
        cls._defaults = {name: getattr(row, name) for name in _METHODS}

    @classmethod
    def name(cls) -> str:
        """Its name in the configuration."""
        return cls._name or cls.__name__.removesuffix("Algorithm").lower()

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Fields of ``algorithm:`` that it sets where the user does not."""
        return {name: value for name, value in cls._defaults.items() if value is not None}

    @classmethod
    def check_config(cls, config: "Config") -> None:
        """Refuse a configuration this algorithm can't run with.

        Raises:
            ValueError: The mode or ``repeat_times`` does not fit.
        """
        if config.mode not in (*cls.modes, "bench", "serve"):
            raise ValueError(
                f"algorithm_type is {cls.name()!r} and mode is {config.mode!r}: {cls.name()} runs "
                f"in mode {' or '.join(cls.modes)}."
            )
        repeat_times = config.algorithm.repeat_times
        if repeat_times is not None and repeat_times < cls.min_repeat_times:
            raise ValueError(
                f"algorithm.repeat_times is {repeat_times}, but {cls.name()} compares the samples "
                f"of a task: set it to {cls.min_repeat_times} or more."
            )
