"""Changes alone give every bit of the new weights, over gloo into a model as vLLM keeps one."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.engine.vllm.test_direct import Stacked
from tests.synchronizer.test_nccl import CPU
from trinity.engine.vllm.direct import DirectLoader
from trinity.synchronizer.buckets import describe, lay_out
from trinity.synchronizer.delta import Patcher, changes
from trinity.synchronizer.nccl import NCCLChannel, NCCLReceiver, ask

SHAPES = {"query": (4, 8), "key": (2, 8), "wide": (5, 6)}


class Engine:
    """What a worker of vLLM's does with weights, and what its engine keeps."""

    def __init__(self, group, num_workers=1):
        self.models = [Stacked() for _ in range(num_workers)]
        self._loaders = [DirectLoader(model) for model in self.models]
        self._receivers = [NCCLReceiver(rank, num_workers, CPU) for rank in range(num_workers)]
        self._group = group
        self.base = None

    def update(self, meeting):
        request = ask(meeting, self._group, len(self.models), self.base)

        def one(worker):
            loader = self._loaders[worker]
            patch = None if self.base is None else loader.patch
            receiver = self._receivers[worker]
            found = receiver.receive(meeting, request, self._group, loader.load, patch)
            loader.finish()
            return found

        with ThreadPoolExecutor(len(self.models)) as pool:
            found = list(pool.map(one, range(len(self.models))))
        self.base = found[0].version
        return found[0]


def new_weights(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(shape, generator=generator).to(dtype) for n, shape in SHAPES.items()}


def assert_same_bits(engine, weights):
    for model in engine.models:
        assert torch.equal(model.both[:4].view(torch.int16), weights["query"].view(torch.int16))
        assert torch.equal(model.both[4:].view(torch.int16), weights["key"].view(torch.int16))
        assert torch.equal(
            model.left.view(torch.int16), weights["wide"][:, 3:].contiguous().view(torch.int16)
        )


@pytest.fixture
def channel():
    made = NCCLChannel(1, is_live=True, timeout_s=60, bucket_bytes=256, sends_delta=True)
    yield made
    made.close()


def test_every_bit_is_there_after_changes_alone(channel):
    live, engine = new_weights(), Engine("one", num_workers=2)
    odd = [float("nan"), -0.0, float("inf"), 1e-40]
    sizes = []
    for version in range(1, 7):
        channel.before_change()
        live["query"][version % 4, version] = odd[version % 4]
        live["wide"][2, 4] += version
        ticket = channel.send(version, live.items())
        sizes.append(engine.update(ticket.payload).num_bytes)
        assert_same_bits(engine, live)
    assert sizes[1:] == [12] * 5  # two words a step, at 6 bytes
    assert sizes[0] > 128


def test_an_engine_without_the_version_before_gets_the_whole(channel):
    live, behind, steady = new_weights(), Engine("behind"), Engine("steady")
    for version in (1, 2, 3):
        channel.before_change()
        live["key"][0, version] = version
        ticket = channel.send(version, live.items())
        steady.update(ticket.payload)
        if version != 2:
            behind.update(ticket.payload)
        else:
            assert behind.base == 1
    assert_same_bits(steady, live)
    assert_same_bits(behind, live)


def test_where_most_changed_the_bucket_itself_is_sent(channel):
    live, engine = new_weights(), Engine("one")
    for version in (1, 2):
        channel.before_change()
        for weight in live.values():
            weight.neg_()
        ticket = channel.send(version, live.items())
        whole = engine.update(ticket.payload).num_bytes
        assert_same_bits(engine, live)
    assert whole > 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_message_holds_new_bits_and_their_places(dtype):
    old = new_weights(dtype)
    new = {name: weight.clone() for name, weight in old.items()}
    new["query"][1, 2] = -old["query"][1, 2]
    new["wide"][4, 5] = 7
    [bucket] = lay_out([describe(n, w) for n, w in old.items()], 2**20)
    buffers = []
    for named in (new, old):
        buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for slot in bucket.slots:
            slot.of(buffer).copy_(named[slot.name])
        buffers.append(buffer)
    count, message = changes(bucket, *buffers)
    assert count == 2 and len(message) == 2 * (4 + dtype.itemsize)
    values, marks = Patcher().open(bucket, count, message)
    for (name, value), (_, mark) in zip(values, marks, strict=True):
        assert torch.equal(torch.where(mark, value, old[name]), new[name])
        assert torch.equal(mark, new[name] != old[name])
