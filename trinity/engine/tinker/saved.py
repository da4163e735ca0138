"""What of a Tinker checkpoint lies here: where the service keeps it. Weights stay there."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from trinity.checkpoint import layout
from trinity.common.models.protocol import WeightTicket

METHOD = "tinker"
"""How weights travel that never leave the service: by their path there."""

_FILE = layout.TINKER


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint at the service.

    Args:
        base_model: The model that its adapter belongs to.
        rank: Of the adapter.
        state: Path of weights and optimizer, to train on from.
        sampler: Path of the weights alone, to sample from.
        num_steps: Optimizer steps behind them.
    """

    base_model: str
    rank: int
    state: str
    sampler: str
    num_steps: int

    @classmethod
    def read(cls, folder: Path) -> "SavedModel":
        """The checkpoint of a model folder, ``.../actor``.

        Raises:
            ValueError: The folder is not one of the Tinker service, or its file is not whole.
        """
        path = Path(folder) / _FILE
        if not path.is_file():
            raise ValueError(
                f"{folder} has no {_FILE}: the checkpoint was not made by `trainer_type: tinker`."
            )
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not as `trainer_type: tinker` wrote it: {error}"
            ) from error

    def difference(self, base_model: str, rank: int) -> str | None:
        """What else it is than an adapter of ``rank`` on ``base_model``, or None."""
        if (self.base_model, self.rank) == (base_model, rank):
            return None
        return (
            f"an adapter of rank {self.rank} on {self.base_model}, and the file asks for rank "
            f"{rank} on {base_model}"
        )

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")


def ticket_of(version: int, sampler: str) -> WeightTicket:
    """Weights of a version as engines take them up. Their path is their digest: it names them."""
    return WeightTicket(version, METHOD, digest=sampler, payload=sampler)
