import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import CheckpointChannel, open_weights
from trinity.utils.digest import weights_digest


def weights(value: float = 1.0) -> dict[str, Tensor]:
    tied = torch.full((5, 3), value)
    return {
        "embed": tied,
        "head": tied,
        "transposed": torch.arange(6.0).reshape(2, 3).T * value,
        "half": torch.full((7,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
    }


def assert_same(received: dict[str, Tensor], sent: dict[str, Tensor]) -> None:
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].equal(tensor), name


def test_weights_survive_files(tmp_path: Path) -> None:
    ticket = CheckpointChannel(tmp_path / "w").send(3, weights().items())
    received = dict(open_weights(ticket))
    assert_same(received, weights())
    assert ticket.digest == weights_digest(weights().items()) == weights_digest(received.items())
    assert (ticket.version, ticket.method) == (3, "checkpoint")
    with safe_open(str(ticket.payload), framework="pt") as file:
        assert file.metadata() == {"digest": ticket.digest}


def test_who_may_read_the_folder_may_read_the_weights(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = Path(str(CheckpointChannel(tmp_path).send(1, weights().items()).payload))
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o644, 0o755)


def test_old_versions_are_dropped_and_foreign_folders_left(tmp_path: Path) -> None:
    (tmp_path / "weights_of_mine").mkdir()
    (tmp_path / "weights_9_backup").mkdir()
    channel = CheckpointChannel(tmp_path, keep=2)
    tickets = [channel.send(version, weights(version).items()) for version in (8, 9, 10, 11)]
    assert {path.name for path in tmp_path.iterdir()} == {
        "weights_of_mine",
        "weights_9_backup",
        "weights_10",
        "weights_11",
    }
    with pytest.raises(FileNotFoundError):
        list(open_weights(tickets[0]))
    assert_same(dict(open_weights(tickets[3])), weights(11))


def test_a_trainer_that_went_back_keeps_what_it_sends(tmp_path: Path) -> None:
    for version in (4, 5):
        CheckpointChannel(tmp_path).send(version, weights(version).items())
    resumed = CheckpointChannel(tmp_path)
    assert_same(dict(open_weights(resumed.send(3, weights(3).items()))), weights(3))
    assert {path.name for path in tmp_path.iterdir()} == {"weights_3"}


def test_an_open_ticket_outlives_its_file(tmp_path: Path) -> None:
    channel = CheckpointChannel(tmp_path, keep=1)
    reading = open_weights(channel.send(1, weights(1).items()))
    first = dict([next(reading)])
    channel.send(2, weights(2).items())
    assert_same(first | dict(reading), weights(1))


def test_a_save_that_fails_leaves_what_was(tmp_path: Path) -> None:
    channel = CheckpointChannel(tmp_path)
    before = channel.send(1, weights(1).items())

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "embed", torch.ones(2)
        yield "head", torch.ones(2).to_sparse()  # can't be stored

    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        channel.send(2, broken())
    assert [path.name for path in tmp_path.iterdir()] == ["weights_1"]
    assert_same(dict(open_weights(before)), weights(1))


def test_what_a_killed_trainer_left_is_cleared(tmp_path: Path) -> None:
    torn = tmp_path / ".saving_abc"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"half")
    CheckpointChannel(tmp_path).send(1, weights().items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights_1"]


def test_a_version_is_told_once_it_can_be_fetched(tmp_path: Path) -> None:
    def tell(version: int) -> None:
        told.append((version, (tmp_path / f"weights_{version}" / "model.safetensors").is_file()))

    told: list[tuple[int, bool]] = []
    channel = CheckpointChannel(tmp_path, on_sent=tell)
    channel.send(1, weights(1).items())
    channel.send(2, weights(2).items())
    assert told == [(1, True), (2, True)]


def test_a_version_may_be_sent_again(tmp_path: Path) -> None:
    channel = CheckpointChannel(tmp_path)
    channel.send(1, weights(1).items())
    ticket = channel.send(1, weights(2).items())
    assert_same(dict(open_weights(ticket)), weights(2))
    assert [path.name for path in (tmp_path / "weights_1").iterdir()] == ["model.safetensors"]


def test_a_torn_file_is_an_error(tmp_path: Path) -> None:
    ticket = CheckpointChannel(tmp_path).send(1, weights().items())
    path = Path(str(ticket.payload))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(SafetensorError):
        list(open_weights(ticket))


def test_checkpoint_tickets_are_plain_data(tmp_path: Path) -> None:
    ticket = CheckpointChannel(tmp_path).send(1, weights().items())
    copy = WeightTicket(**json.loads(json.dumps(vars(ticket))))
    assert_same(dict(open_weights(copy)), weights())


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="pigeon"):
        list(open_weights(WeightTicket(1, "pigeon", "", None)))
