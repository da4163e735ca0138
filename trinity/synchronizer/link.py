"""A group of the trainer and an engine's workers, through which weights go bucket by bucket."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trinity.synchronizer.buckets import Bucket
from trinity.synchronizer.delta import Patcher, changes, message_bytes
from trinity.utils.digest import WeightsDigest

TRAINER = 0
"""Rank of the trainer in every group."""

Named = Sequence[tuple[str, Tensor]]
Load = Callable[[Named], None]
Patch = Callable[[Named, Named], None]

_SPIN_S = 0.0005
_FIRST = -1  # priority of a CUDA stream: an engine waits, and the trainer's next step need not
_WATCHDOGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")


class Link:
    """A group of the trainer and an engine's workers, and the buffers that weights go through."""

    def __init__(
        self, store: Any, name: str, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        self._device = device
        self._name = name
        self._place = f"rank {rank} of {size} ({_role(rank)})"
        self._passing: list[tuple[Bucket, torch.cuda.Event]] = []
        self._store = store
        self._timeout_s = timeout_s
        self._patcher = Patcher()
        self._group = _process_group(dist.PrefixStore(name, store), rank, size, device, timeout_s)
        self._stream = torch.cuda.Stream(device, _FIRST) if device.type == "cuda" else None
        self._buffers: list[Tensor] = []

    def send(self, weights: Sequence[Tensor], buckets: Sequence[Bucket], ready: Any) -> str:
        """Send all buckets; the digest of what was sent."""
        digest, tensors = WeightsDigest(), iter(weights)
        with self._on_stream(ready):
            for number, (bucket, buffer) in enumerate(self._through(buckets)):
                fill(bucket, buffer, tensors)
                self._broadcast(bucket, buffer)
                digest.add(f"bucket {number}", buffer)
            self._wait()
            return digest.hexdigest()

    def send_changes(
        self,
        weights: Sequence[Tensor],
        buckets: Sequence[Bucket],
        ready: Any,
        old: Sequence[Tensor] | None,
        request: str,
    ) -> str:
        """Send what differs from ``old``, each bucket announced; the digest of what was sent."""
        digest, tensors = WeightsDigest(), iter(weights)
        with self._on_stream(ready):
            for number, (bucket, buffer) in enumerate(self._through(buckets, zeroes=True)):
                fill(bucket, buffer, tensors)
                count, message = (-1, None) if old is None else changes(bucket, buffer, old[number])
                self._store.set(f"part/{request}/{number}", str(count))
                sent = buffer if message is None else message
                if len(sent):
                    self._broadcast(bucket, sent)
                    digest.add(f"bucket {number}, {count}", sent)
            self._wait()
            return digest.hexdigest()

    def receive_changes(
        self, buckets: Sequence[Bucket], load: Load, patch: Patch, request: str
    ) -> tuple[int, str]:
        """Receive what `send_changes` sends; its size, and the digest of what came."""
        digest, num_bytes = WeightsDigest(), 0
        with self._on_stream(None):
            for number, (bucket, buffer) in enumerate(self._through(buckets)):
                count = int(self._store.get(f"part/{request}/{number}"))
                sent = buffer if count < 0 else buffer[: message_bytes(bucket, count)]
                if not len(sent):
                    continue
                self._broadcast(bucket, sent)
                digest.add(f"bucket {number}, {count}", sent)
                num_bytes += len(sent)
                if count < 0:
                    load([(slot.name, slot.of(sent)) for slot in bucket.slots])
                else:
                    patch(*self._patcher.open(bucket, count, sent))
            self._wait()
            return num_bytes, digest.hexdigest()

    def receive(self, buckets: Sequence[Bucket], load: Load) -> tuple[int, str]:
        """Receive all buckets, and load each; their size, and the digest of what came."""
        digest = WeightsDigest()
        with self._on_stream(None):
            for number, (bucket, buffer) in enumerate(self._through(buckets)):
                self._broadcast(bucket, buffer)
                load([(slot.name, slot.of(buffer)) for slot in bucket.slots])
                digest.add(f"bucket {number}", buffer)
            self._wait()
            return sum(bucket.num_bytes for bucket in buckets), digest.hexdigest()

    def _wait(self) -> None:
        """Wait until the GPU has done all this, but no longer than the deadline.

        Raises:
            TimeoutError: The other end died or hangs; the group is of no use any more.
        """
        end = time.monotonic() + self._timeout_s
        while self._stream is not None and not self._stream.query():
            if time.monotonic() > end:
                self._group.abort()
                stuck = (bucket for bucket, passed in self._passing if not passed.query())
                within = f"within {self._timeout_s:.0f} s: the other end died or hangs"
                raise TimeoutError(self._told(next(stuck, None), within))
            time.sleep(_SPIN_S)
        self._passing.clear()

    def _told(self, bucket: Bucket | None, why: str) -> str:
        """Which weights did not get through, and at whom."""
        names = [slot.name for slot in bucket.slots] if bucket is not None else []
        which = f"({' to '.join(dict.fromkeys((names[0], names[-1])))}) " if names else ""
        return f"Weights {which}of {self._name} did not get through at {self._place} {why}."

    def _through(
        self, buckets: Sequence[Bucket], zeroes: bool = False
    ) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with the buffer that it goes through, one after the other.

        With ``zeroes`` the bytes between tensors are 0.
        """
        largest = max(bucket.num_bytes for bucket in buckets)
        if not self._buffers or len(self._buffers[0]) < largest:
            make = torch.empty(2, largest, dtype=torch.uint8, device=self._device)
            self._buffers = list(make)
        for number, bucket in enumerate(buckets):
            buffer = self._buffers[number % 2][: bucket.num_bytes]
            yield bucket, buffer.zero_() if zeroes else buffer

    def _broadcast(self, bucket: Bucket, buffer: Tensor) -> None:
        """Send or receive what is to be sent of ``bucket``; on a GPU, have that begin."""
        options = dist.distributed_c10d.BroadcastOptions()
        options.rootRank = TRAINER
        try:
            self._group.broadcast([buffer], options).wait()
        except RuntimeError as error:
            raise RuntimeError(self._told(bucket, f"({error})")) from error
        if self._stream is not None:
            self._passing.append((bucket, self._stream.record_event()))

    @contextmanager
    def _on_stream(self, ready: Any) -> Iterator[None]:
        """Within, this link's own stream, which begins after ``ready``."""
        if self._stream is None:
            yield
            return
        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if ready is None:
                self._stream.wait_stream(torch.cuda.default_stream(self._device))
            else:
                self._stream.wait_event(ready)
            yield


def _role(rank: int) -> str:
    return "the trainer" if rank == TRAINER else f"worker {rank - 1} of the engine"


def _process_group(store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """A group beside whatever groups these processes have, and known to nothing else."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = 2 * timeout
    with torch.cuda.device(device), _surviving():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _surviving() -> Iterator[None]:
    """Groups made within leave this process alive when a peer dies: `Link` has its own deadline.

    PyTorch would end it at an error of NCCL's, or when its watchdog hears nothing from the GPU.
    """
    kept = {name: os.environ.get(name) for name in _WATCHDOGS}
    os.environ.update(dict.fromkeys(_WATCHDOGS, "0"))
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def open_store(host: str, port: int, timeout_s: float) -> Any:
    """The table at the trainer through which both ends find each other."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def fill(bucket: Bucket, buffer: Tensor, weights: Iterator[Tensor]) -> None:
    """Lay the next of ``weights`` into a bucket's bytes."""
    slots = [slot.of(buffer) for slot in bucket.slots]
    torch._foreach_copy_(slots, [next(weights) for _ in slots])
