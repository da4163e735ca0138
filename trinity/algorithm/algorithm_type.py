"""What an algorithm is: which methods it combines, what it needs, where it may run."""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, ClassVar

from trinity.common.config.algorithm_table import ALGORITHMS, AlgorithmSpec
from trinity.common.constants import Mode
from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.common.config import Config

_SETTINGS = (
    "repeat_times",
    "sample_strategy",
    "advantage_fn",
    "policy_loss_fn",
    "kl_penalty_fn",
    "kl_loss_fn",
    "entropy_loss_fn",
    "loss_agg_mode",
)
_NEEDS = tuple(f.name for f in fields(AlgorithmSpec) if f.name not in _SETTINGS)


class _Constant(type):
    """Class attributes that are set once: an algorithm is the same for every part of a run."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name.startswith("__"):
            return super().__setattr__(name, value)
        raise AttributeError(f"{cls.__name__}.{name} is constant: subclass it to change it.")


class AlgorithmType(metaclass=_Constant):
    """An algorithm, by its parts.

    A built-in one is ``class GRPO(AlgorithmType, table="grpo")``: its attributes are the row of
    `trinity.common.config.algorithm_table`. A plugin sets attributes and `default_config` itself
    (or names a row to start from), and registers in `trinity.algorithm.ALGORITHM_TYPE`.
    """

    use_critic: ClassVar[bool] = False
    """Whether a value model is trained beside the policy."""

    use_reference: ClassVar[bool] = False
    """Whether a reference model is there for the KL, unless the KL in force is ``none``."""

    compute_advantage_in_trainer: ClassVar[bool] = False
    """Whether advantages need what only the trainer has; else the explorer computes them."""

    can_balance_batch: ClassVar[bool] = True
    """Plugins may set it, but nothing reads it: pairs of rows stay together on any rank."""

    schema: ClassVar[str] = "experience"
    """What a row of its data is: ``experience``, ``sft``, ``cpt`` or ``dpo``."""

    modes: ClassVar[frozenset[Mode]] = frozenset(Mode)
    """Modes it runs in."""

    min_repeat_times: ClassVar[int] = 1
    """Samples of a task that it needs at least."""

    fixed_repeat_times: ClassVar[bool] = False
    """Whether any ``repeat_times`` but its own is an error."""

    family: ClassVar[str] = ""
    """Kind of method, for the table of algorithms."""

    formula: ClassVar[str] = ""
    """Advantage and loss in one line."""

    paper: ClassVar[str] = ""
    """Where it comes from."""

    when: ClassVar[str] = ""
    """When to use it."""

    __table: ClassVar[str] = ""

    def __init_subclass__(cls, table: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not table:
            return
        row = ALGORITHMS[table]
        type.__setattr__(cls, "_AlgorithmType__table", table)
        for name in _NEEDS:
            if name not in cls.__dict__:
                type.__setattr__(cls, name, getattr(row, name))

    @classmethod
    def name(cls) -> str:
        """Its name in the configuration."""
        registered = [name for name in ALGORITHM_TYPE.names() if ALGORITHM_TYPE.holds(name, cls)]
        return registered[0] if registered else cls.__name__.removesuffix("Algorithm").lower()

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Fields of ``algorithm:`` that it sets where the user does not."""
        row = ALGORITHMS.get(cls.__table, AlgorithmSpec())
        return {name: value for name, value in asdict(row).items() if name in _SETTINGS}

    @classmethod
    def spec(cls) -> AlgorithmSpec:
        """The algorithm as the row of the table that the configuration reads."""
        needs = {name: getattr(cls, name) for name in _NEEDS}
        return AlgorithmSpec(**{**asdict(AlgorithmSpec()), **cls.default_config(), **needs})

    @classmethod
    def check_config(cls, config: "Config") -> None:
        """Refuse a configuration this algorithm can't run with.

        Raises:
            ValueError: The mode or ``repeat_times`` does not fit.
        """
        if config.mode not in cls.modes:
            raise ValueError(
                f"algorithm.algorithm_type is {cls.name()!r}, which runs only in mode "
                f"{' or '.join(sorted(cls.modes))}, but mode is {str(config.mode)!r}."
            )
        own, asked = cls.default_config()["repeat_times"], config.algorithm.repeat_times
        if asked is None or asked == own:
            return
        if cls.fixed_repeat_times or asked < cls.min_repeat_times:
            least = "" if cls.fixed_repeat_times else " or more"
            raise ValueError(
                f"algorithm.repeat_times is {asked}, but {cls.name()} needs "
                f"{own if cls.fixed_repeat_times else cls.min_repeat_times}{least} samples of a "
                "task. Set it so, or leave it out."
            )


class _AlgorithmRegistry(Registry[type[AlgorithmType]]):
    """Registering an algorithm also makes it a row of the configuration's table."""

    def _register(self, name: str, entry: type[AlgorithmType], force: bool) -> None:
        super()._register(name, entry, force)
        ALGORITHMS[name] = entry.spec()

    def holds(self, name: str, entry: type[AlgorithmType]) -> bool:
        """Whether ``name`` stands for ``entry``, without loading it."""
        path = f"{entry.__module__}.{entry.__qualname__}"
        return self._loaded.get(name) is entry or self._builtins.get(name) == path


_HERE = "trinity.algorithm.algorithms"

ALGORITHM_TYPE = _AlgorithmRegistry(
    "algorithm type",
    {
        "ppo": f"{_HERE}.PPO",
        "grpo": f"{_HERE}.GRPO",
        "dapo": f"{_HERE}.DAPO",
        "reinforceplusplus": f"{_HERE}.ReinforcePlusPlus",
        "rloo": f"{_HERE}.RLOO",
        "opmd": f"{_HERE}.OPMD",
        "asymre": f"{_HERE}.AsymRE",
        "topr": f"{_HERE}.TOPR",
        "cispo": f"{_HERE}.CISPO",
        "gspo": f"{_HERE}.GSPO",
        "sapo": f"{_HERE}.SAPO",
        "rec": f"{_HERE}.REC",
        "sppo": f"{_HERE}.SPPO",
        "mix": f"{_HERE}.Mix",
        "mix_chord": f"{_HERE}.MixCHORD",
        "raft": f"{_HERE}.RAFT",
        "multi_step_grpo": f"{_HERE}.MultiStepGRPO",
        "gigpo": f"{_HERE}.GiGPO",
        "on_policy_distill": f"{_HERE}.OnPolicyDistill",
        "jsd": f"{_HERE}.JSD",
        "grpo_verl": f"{_HERE}.GRPOverl",
        "sft": f"{_HERE}.SFT",
        "cpt": f"{_HERE}.CPT",
        "dpo": f"{_HERE}.DPO",
    },
)
