"""The channel between GPUs, on CPUs: the same protocol over gloo."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from trinity.synchronizer import nccl
from trinity.synchronizer.buckets import describe, lay_out
from trinity.synchronizer.link import TRAINER, Link, open_store
from trinity.synchronizer.nccl import NCCLChannel, NCCLReceiver, ask

CPU = torch.device("cpu")


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 33), "b": (129,), "c": (64, 64), "d": (3,)}
    return {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def fetch(meeting, receivers, group, engine=None):
    """What all workers of an engine get for one request."""
    request = ask(meeting, group, len(receivers), engine=engine)

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


def test_the_trainer_keeps_no_buffers_for_engines_that_were_started_again(channel, monkeypatch):
    ends = weakref.WeakSet()

    class Counted(Link):
        def __init__(self, *args):
            super().__init__(*args)
            if args[2] == TRAINER:
                ends.add(self)

    monkeypatch.setattr(nccl, "Link", Counted)
    kept = receivers()
    for life in range(4):  # the second engine dies after each version
        sent = weights(life)
        meeting = channel.send(1 + life, sent.items()).payload
        for engine, group, ends_at in (
            ("first", "first", kept),
            ("second", f"second, life {life}", receivers()),
        ):
            [(_, found)] = fetch(meeting, ends_at, group, engine)
            assert is_same(found, sent)
    deadline = time.monotonic() + 60
    while len(ends) > 2 and time.monotonic() < deadline:  # a thread of the trainer lets them go
        gc.collect()
        time.sleep(0.01)
    assert len(ends) == 2


def test_a_wrong_bit_on_the_way_is_noticed(channel, tmp_path):
    ticket = channel.send(1, weights(1).items())
    [receiver] = receivers()

    def spoil(named):
        named[0][1].view(-1)[0] += 1

    request = ask(ticket.payload, "spoilt", 1)
    with pytest.raises(RuntimeError, match="digest"):
        receiver.receive(ticket.payload, request, "spoilt", spoil)


def test_an_engine_that_asks_and_dies_keeps_nobody_waiting():
    channel = NCCLChannel(2, is_live=True, timeout_s=15, bucket_bytes=1000)
    sent = weights(1)
    ticket = channel.send(1, sent.items())
    ask(ticket.payload, "dead", 1)
    [(delivery, found)] = fetch(replace(ticket.payload, timeout_s=60), receivers(), "alive")
    assert delivery.version == 1 and is_same(found, sent)
    channel.close()


def test_an_end_that_is_left_alone_names_itself_and_the_tensors():
    """The trainer ends after the first bucket, which its engine waits in vain for the rest of."""
    sent = weights(1)
    entries = [describe(name, tensor) for name, tensor in sent.items()]
    buckets = lay_out(entries, 1000)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def link(rank):
        return Link(open_store("127.0.0.1", store.port, 60), "one", rank, 2, CPU, 60)

    with ThreadPoolExecutor(2) as pool:
        trainer, engine = pool.map(link, (TRAINER, 1))
    received = []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.receive, buckets, received.extend)
        trainer.send(list(sent.values()), buckets[:1], None)
        del trainer
        with pytest.raises(RuntimeError) as told:
            waiting.result(60)
    first, last = buckets[1].slots[0].name, buckets[1].slots[-1].name
    names = first if first == last else f"{first} to {last}"
    assert [name for name, _ in received] == [slot.name for slot in buckets[0].slots]
    assert f"Weights ({names}) of one did not get through" in str(told.value)
    assert "at rank 1 of 2 (worker 0 of the engine)" in str(told.value)
