"""The channel between GPUs, on CPUs: the same protocol over gloo."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from trinity.synchronizer.nccl import NCCLChannel, NCCLReceiver, ask

CPU = torch.device("cpu")


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 33), "b": (129,), "c": (64, 64), "d": (3,)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def fetch(meeting, receivers, group):
    """What all workers of an engine get for one request."""
    request = ask(meeting, group, len(receivers))

    def one(receiver):
        found = {}
        take = lambda named: found.update({n: t.clone() for n, t in named})  # noqa: E731
        return receiver.receive(meeting, request, group, take), found

    with ThreadPoolExecutor(len(receivers)) as pool:
        return list(pool.map(one, receivers))


def receivers(count=1):
    return [NCCLReceiver(rank, count, CPU) for rank in range(count)]


def is_same(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.fixture
def channel():
    made = NCCLChannel(1, is_live=True, timeout_s=60, bucket_bytes=1000)
    yield made
    made.close()


def test_all_workers_get_every_bit_again_and_again(channel):
    engine = receivers(2)
    for version in (1, 2, 3):
        sent = weights(version)
        ticket = channel.send(version, sent.items())
        results = fetch(ticket.payload, engine, "one")
        assert all(is_same(found, sent) for _, found in results)
        assert {delivery.version for delivery, _ in results} == {version}
        assert len({delivery.digest for delivery, _ in results}) == 1


def test_who_asks_after_the_step_gets_what_was_sent(channel):
    live = weights(0)
    kept = {name: tensor.clone() for name, tensor in live.items()}
    ticket = channel.send(5, live.items())
    channel.before_change()
    for tensor in live.values():
        tensor.zero_()
    [(delivery, found)] = fetch(ticket.payload, receivers(), "late")
    assert delivery.version == 5 and is_same(found, kept)


def test_a_restarted_engine_waits_for_the_next_weights_once_the_old_ones_are_gone(channel):
    first = channel.send(1, weights(1).items())
    fetch(first.payload, receivers(), "before")
    channel.before_change()
    newer = weights(2)
    timer = threading.Timer(0.3, channel.send, (2, newer.items()))
    timer.start()
    [(delivery, found)] = fetch(first.payload, receivers(), "after")
    assert delivery.version == 2 and is_same(found, newer)


def test_a_wrong_bit_on_the_way_is_noticed(channel, tmp_path):
    ticket = channel.send(1, weights(1).items())
    [receiver] = receivers()

    def spoil(named):
        named[0][1].view(-1)[0] += 1

    request = ask(ticket.payload, "spoilt", 1)
    with pytest.raises(RuntimeError, match="digest"):
        receiver.receive(ticket.payload, request, "spoilt", spoil)


def test_an_engine_that_asks_and_dies_keeps_nobody_waiting():
    channel = NCCLChannel(2, is_live=True, timeout_s=5, bucket_bytes=1000)
    sent = weights(1)
    ticket = channel.send(1, sent.items())
    ask(ticket.payload, "dead", 1)
    [(delivery, found)] = fetch(replace(ticket.payload, timeout_s=60), receivers(), "alive")
    assert delivery.version == 1 and is_same(found, sent)
    channel.close()
