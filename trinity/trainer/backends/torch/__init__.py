"""`TrainEngine` on plain PyTorch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity.synchronizer.channel import WeightChannel
    from trinity.trainer.backends.torch.engine import TorchTrainEngine
    from trinity.trainer.backends.torch.settings import TorchEngineSettings


def make_engine(
    settings: "TorchEngineSettings", channel: "WeightChannel | None"
) -> "TorchTrainEngine":
    """An engine in this process: what its class imports stays out of others'."""
    from trinity.trainer.backends.torch.engine import TorchTrainEngine

    return TorchTrainEngine(settings, channel)
