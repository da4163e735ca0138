"""The Tinker service as a trainer; its engine is `trinity.engine.tinker`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity.trainer.backends.tinker.engine import TinkerTrainEngine
    from trinity.trainer.backends.tinker.settings import TinkerTrainSettings


def make_engine(settings: "TinkerTrainSettings") -> "TinkerTrainEngine":
    """An engine in this process: what its class imports stays out of others'."""
    from trinity.trainer.backends.tinker.engine import TinkerTrainEngine

    return TinkerTrainEngine(settings)
