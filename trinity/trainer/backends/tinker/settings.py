"""What a `TinkerTrainEngine` has to know: plain values, no sections of the configuration."""

from dataclasses import dataclass, field

from trinity.engine.tinker.settings import TinkerServiceSettings
from trinity.trainer.backends.torch.optimizer import OptimizerSettings


@dataclass(frozen=True)
class TinkerTrainSettings:
    """An adapter that the service trains.

    Args:
        service: Where, and on which model.
        rank: Of the adapter.
        seed: Of its first values; None: the service picks one.
        train_mlp, train_attn, train_unembed: Which layers get one.
        optimizer: Settings of each step; the service steps with AdamW.
    """

    service: TinkerServiceSettings
    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
