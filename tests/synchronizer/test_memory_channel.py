import asyncio
import warnings
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest
import torch
from torch import Tensor

from tests.dying import end_of
from tests.synchronizer.test_channel import assert_same, weights
from trinity.common.models.protocol import WeightTicket
from trinity.launcher.cluster import ray_cluster
from trinity.synchronizer.board import VersionBoard
from trinity.synchronizer.channel import MemoryChannel, open_weights
from trinity.utils import actor
from trinity.utils.actor import ProcessDied, spawn
from trinity.utils.digest import weights_digest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NAMESPACE = "test_memory_channel"
MB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with ray_cluster("local", NAMESPACE, {"OMP_NUM_THREADS": "1"}):
        yield


class Sender:
    """The trainer's side, in a process of its own."""

    def __init__(self, keep: int = 1, bucket_bytes: int = 64) -> None:
        self.channel = MemoryChannel(keep, bucket_bytes)

    async def send(self, version: int) -> WeightTicket:
        return self.channel.send(version, weights(float(version)).items())

    async def send_large(self, num_parts: int, part_bytes: int) -> tuple[WeightTicket, int]:
        """Weights made one by one, as a gather would; and the growth of private memory by it."""
        before = _private_bytes()
        peak = 0

        def made() -> Iterator[tuple[str, Tensor]]:
            nonlocal peak
            for index in range(num_parts):
                yield f"part.{index}", torch.full((part_bytes // 4,), float(index))
                peak = max(peak, _private_bytes() - before)

        return MemoryChannel(bucket_bytes=part_bytes).send(1, made()), peak


def _private_bytes() -> int:
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared


class Receiver:
    """An engine's side: copies weights into its own, as `load_weights` does."""

    async def load(self, ticket: WeightTicket) -> tuple[str, dict[str, Tensor]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            own = {name: tensor.clone() for name, tensor in open_weights(ticket, 30)}
        return weights_digest(own.items()), own


async def test_weights_reach_two_engines_through_the_board() -> None:
    sender = spawn(Sender, name="sender", namespace=NAMESPACE)
    engines = [spawn(Receiver, name=f"engine_{i}", namespace=NAMESPACE) for i in range(2)]
    board = VersionBoard()
    for version in (1, 2):
        await board.publish(await sender.send(version))
        ticket = await board.wait_newer(version - 1, 10)
        assert ticket is not None
        for engine in engines:
            digest, received = await engine.load(ticket)
            assert digest == ticket.digest
            assert_same(received, weights(float(version)))
    assert len(ticket.payload) > 1  # type: ignore[arg-type]  # several buckets
    for part in (sender, *engines):
        actor.kill(part)


async def test_an_engine_that_starts_later_gets_the_newest() -> None:
    sender = spawn(Sender, name="sender", namespace=NAMESPACE)
    await sender.send(1)
    ticket = await sender.send(2)
    await sender.send(3)
    late = spawn(Receiver, name="late", namespace=NAMESPACE)
    digest, _ = await late.load(ticket)  # the ticket itself keeps the weights
    assert digest == ticket.digest
    actor.kill(sender)
    actor.kill(late)


async def test_weights_of_a_dead_trainer_are_right_or_an_error() -> None:
    sender = spawn(Sender, name="sender", namespace=NAMESPACE)
    engine = spawn(Receiver, name="engine", namespace=NAMESPACE)
    ticket = await sender.send(1)
    actor.kill(sender)
    await end_of(lambda: sender.send(2))
    with suppress(ProcessDied):  # the store gives the last weights until it notices
        for _ in range(20):
            assert (await engine.load(ticket))[0] == ticket.digest
            await asyncio.sleep(0.1)
    actor.kill(engine)


async def test_sending_holds_one_bucket_beside_the_store() -> None:
    sender = spawn(Sender, name="sender", namespace=NAMESPACE)
    await sender.send(1)
    part = 40 * MB  # large enough for malloc to give it back at once
    ticket, growth = await sender.send_large(8, part)
    assert growth < 5 * part
    assert sum(t.nbytes for _, t in open_weights(ticket)) == 8 * part
    actor.kill(sender)
