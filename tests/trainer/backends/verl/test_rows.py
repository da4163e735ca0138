"""What veRL is told of rows; it need not be installed."""

import torch

from tests.trainer.toy import groups
from trinity.trainer.backends.verl.loss import FILLER
from trinity.trainer.backends.verl.rows import temperatures
from trinity.trainer.batch import TrainBatch


def heats(own: list[float] | None, numbers: list[int], default: float = 0.7) -> object:
    batch = TrainBatch.from_experiences(groups(1, 3))
    if own is not None:
        batch = batch.with_columns(temperature=torch.tensor(own))
    found = temperatures(batch, torch.tensor(numbers), default)
    return found.tolist() if isinstance(found, torch.Tensor) else found


def test_rows_of_one_temperature_share_one_number():
    assert heats(None, [0, 1, FILLER]) == 0.7
    assert heats([1.0, 1.0, 1.0], [0, 1, 2, FILLER]) == 1.0
    assert heats([0.5, 0.5, 1.0], [0, 1, FILLER]) == 0.5  # those of this rank
    assert heats([0.5, 0.5, 1.0], [FILLER]) == 0.7
    assert heats([0.0, 0.5, 0.25], [0, 1, 2, FILLER], default=1.0) == [1.0, 0.5, 0.25, 1.0]
