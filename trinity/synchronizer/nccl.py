"""Weights from GPU to GPU: `NCCLChannel` at the trainer, `NCCLReceiver` in an engine's worker.

The trainer answers requests. An engine asks for the newest weights; its workers and the trainer
then form a group (kept for the next time) and the weights go through two buffers, bucket by
bucket, on a stream of their own, while both ends take the digest of what passes. So an engine that
starts again gets the weights like any other, and nobody holds a second copy of the model.

The weights sent are the trainer's own, not copies. Before it changes them (`before_change`), it
waits for a transfer under way, and puts a copy aside if an engine has not asked yet.

With ``sends_delta`` the trainer keeps a copy of the version before, and sends an engine that has it
only what changed (`trinity.synchronizer.delta`); any other engine gets the whole.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.buckets import Entry, describe, lay_out
from trinity.synchronizer.channel import NamedTensors
from trinity.synchronizer.link import TRAINER, Link, Load, Patch, fill, open_store
from trinity.utils.host import own_host
from trinity.utils.log import get_logger

METHOD = "nccl"

_BUCKET_BYTES = 256 * 2**20
_PATIENCE_S = 60.0  # PyTorch writes a warning each time it runs out
_CLOSING_S = 1.0


@dataclass(frozen=True)
class Meeting:
    """Where the trainer answers, and what it sends. Plain values, so that messages carry it."""

    host: str
    port: int
    group: str
    bucket_bytes: int
    entries: Sequence[Entry]
    timeout_s: float
    sends_delta: bool = False


@dataclass(frozen=True)
class Delivery:
    """What came: its digest, and the version, which may be newer than the one asked for.

    Args:
        num_bytes: That came, for all weights.
    """

    digest: str
    version: int
    num_bytes: int = 0


class NCCLChannel:
    """The trainer's end; lives in the process that has the weights.

    Args:
        num_engines: Engines that ask for each version.
        is_live: What is sent are the model's own weights; `before_change` is called before the
            next step changes them.
        copies: Send copies: nobody calls `before_change`, and the weights may be the model's own.
        sends_delta: Send what changed to who has the version before.
        log_name: Of the log that tells of engines which ask.
        group: First part of the groups' names.
        timeout_s: How long one end waits for the other.
    """

    method = METHOD

    def __init__(
        self,
        num_engines: int,
        is_live: bool,
        group: str = "weights",
        timeout_s: float = 600,
        bucket_bytes: int = _BUCKET_BYTES,
        copies: bool = False,
        sends_delta: bool = False,
        log_name: str = "trainer",
    ) -> None:
        self._copies = copies
        self._sends_delta = sends_delta
        self._log_name = log_name
        self._num_engines = num_engines
        self._is_live = is_live
        self._group = group
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._sender: _Sender | None = None

    def send(self, version: int, weights: NamedTensors) -> WeightTicket:
        """Offer the weights to whoever asks; returns at once."""
        named = [(name, t.clone() if self._copies else t) for name, t in weights]
        if self._sender is None:
            device = named[0][1].device
            self._sender = _Sender(
                device,
                self._group,
                self._timeout_s,
                self._bucket_bytes,
                self._sends_delta,
                self._log_name,
            )
        entries = [describe(name, tensor) for name, tensor in named]
        self._sender.offer(version, [tensor for _, tensor in named], entries)
        meeting = Meeting(
            self._sender.host,
            self._sender.port,
            self._group,
            self._bucket_bytes,
            entries,
            self._timeout_s,
            self._sends_delta,
        )
        return WeightTicket(version, METHOD, "", meeting)

    def before_change(self) -> None:
        """The weights that were sent are about to change."""
        if self._sender is not None and self._is_live:
            self._sender.let_go(self._num_engines)

    def close(self) -> None:
        """Answer no more."""
        if self._sender is not None:
            self._sender.close()


class _Sender:
    """Answers requests in a thread of its own."""

    def __init__(
        self,
        device: torch.device,
        group: str,
        timeout_s: float,
        bucket_bytes: int,
        sends_delta: bool,
        log_name: str,
    ) -> None:
        self.host = own_host()
        self._server = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self.port = int(self._server.port)
        self._device = device
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._changed = threading.Condition()
        self._is_closed = False
        self._version = 0
        self._weights: list[Tensor] | None = None
        self._entries: Sequence[Entry] = ()
        self._ready: Any = None  # a CUDA event
        self._num_served = 0
        self._is_aside = False
        self._before = _Before(bucket_bytes) if sends_delta else None
        self._links: dict[str, tuple[str, Link]] = {}  # by engine, with the name of the group
        self._logger = get_logger(log_name)
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def offer(self, version: int, weights: list[Tensor], entries: Sequence[Entry]) -> None:
        with self._changed:
            self._keep_before()
            self._version, self._weights, self._entries = version, weights, entries
            self._num_served, self._is_aside = 0, False
            self._mark_ready()
            self._changed.notify_all()

    def let_go(self, num_engines: int) -> None:
        with self._changed:  # which a transfer under way holds
            if self._weights is None or self._is_aside:
                return
            self._keep_before()
            if self._num_served >= num_engines:
                self._weights = None
                return
            self._weights = [_put_aside(tensor) for tensor in self._weights]
            self._is_aside = True
            self._mark_ready()

    def _keep_before(self) -> None:
        """Copy what is sent now, to tell what the next version changes."""
        if self._before is not None and self._weights is not None and not self._is_aside:
            self._before.keep(self._version, self._weights, self._entries)

    def _mark_ready(self) -> None:
        """What was asked of the GPU so far has to be done before the weights go out."""
        if self._device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        _put_request(self._server, None)
        self._thread.join(_CLOSING_S)
        self._links.clear()

    def _serve(self) -> None:
        inbox = open_store(self.host, self.port, self._timeout_s)
        number = 1
        while not self._is_closed:
            key = f"request/{number}"
            try:
                inbox.wait([key], timedelta(seconds=_PATIENCE_S))
            except RuntimeError:  # nobody asked yet
                continue
            number += 1
            request = json.loads(inbox.get(key))
            if request is None:
                continue
            try:
                answer = self._answer(request, key)
            except Exception as error:  # told to who asked; the next one may fare better
                self._logger.exception("Weights could not be sent to %s.", request["group"])
                self._links.pop(request["engine"], None)
                answer = {"error": f"{type(error).__name__}: {error}"}
            inbox.set(f"answer/{key}", json.dumps(answer))

    def _answer(self, request: dict[str, Any], key: str) -> dict[str, object]:
        with self._changed:
            self._changed.wait_for(lambda: self._weights is not None or self._is_closed)
            if self._weights is None:
                return {"error": "the trainer has ended"}
            link, buckets = self._link_to(request), lay_out(self._entries, self._bucket_bytes)
            if request["base"] is None:
                digest = link.send(self._weights, buckets, self._ready)
            else:
                old = None if self._before is None else self._before.of(request["base"])
                digest = link.send_changes(self._weights, buckets, self._ready, old, key)
            self._num_served += 1
            return {"digest": digest, "version": self._version}

    def _link_to(self, request: dict[str, Any]) -> Link:
        """The link to who asks; that of an engine before its restart makes room for it."""
        engine, group = request["engine"], request["group"]
        if engine not in self._links or self._links[engine][0] != group:
            self._links.pop(engine, None)
            store = open_store(self.host, self.port, self._timeout_s)
            size = request["world_size"]
            link = Link(store, group, TRAINER, size, self._device, self._timeout_s)
            self._links[engine] = group, link
        return self._links[engine][1]


class _Before:
    """A copy of the version before, bucket by bucket."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._version = -1
        self._buffers: list[Tensor] = []

    @torch.no_grad()
    def keep(self, version: int, weights: Sequence[Tensor], entries: Sequence[Entry]) -> None:
        buckets, tensors = lay_out(entries, self._bucket_bytes), iter(weights)
        if [len(buffer) for buffer in self._buffers] != [b.num_bytes for b in buckets]:
            make = partial(torch.zeros, dtype=torch.uint8, device=weights[0].device)
            self._buffers = [make(bucket.num_bytes) for bucket in buckets]
        for bucket, buffer in zip(buckets, self._buffers, strict=True):
            fill(bucket, buffer, tensors)
        self._version = version

    def of(self, version: int) -> list[Tensor] | None:
        """Its buckets, if it is that version."""
        return self._buffers if version == self._version else None


class NCCLReceiver:
    """An engine's worker's end. Knows nothing of the engine.

    Args:
        rank: Of this worker among all of its engine, from 0.
        num_workers: Of the engine.
    """

    def __init__(self, rank: int, num_workers: int, device: torch.device) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._device = device
        self._name = ""
        self._store: Any = None
        self._link: Link | None = None

    def receive(
        self,
        meeting: Meeting,
        request: str,
        group: str,
        load: Load,
        patch: Patch | None = None,
    ) -> Delivery:
        """Take the weights that were asked for by ``request``, and give them to ``load``.

        Args:
            patch: Takes new elements and which of them count, where changes come; to be given
                if, and only if, the request named a base.

        Raises:
            RuntimeError: What came is not what the trainer sent, or it could not send.
        """
        name = f"{meeting.host}:{meeting.port}/{group}"
        if self._link is None or name != self._name:
            self._store = open_store(meeting.host, meeting.port, meeting.timeout_s)
            rank, size = 1 + self._rank, 1 + self._num_workers
            self._link = Link(self._store, group, rank, size, self._device, meeting.timeout_s)
            self._name = name
        buckets = lay_out(meeting.entries, meeting.bucket_bytes)
        if patch is None:
            num_bytes, digest = self._link.receive(buckets, load)
        else:
            num_bytes, digest = self._link.receive_changes(buckets, load, patch, request)
        answer = json.loads(self._store.get(f"answer/{request}"))
        if "error" in answer:
            raise RuntimeError(f"The trainer could not send its weights: {answer['error']}")
        if answer["digest"] != digest:
            raise RuntimeError(
                f"Weights with digest {digest} came by NCCL, but the trainer sent "
                f"{answer['digest']}."
            )
        return Delivery(digest, int(answer["version"]), num_bytes)


def ask(
    meeting: Meeting,
    group: str,
    num_workers: int,
    base: int | None = None,
    engine: str | None = None,
) -> str:
    """Ask the trainer for its weights, on behalf of all workers of an engine; the request's key.

    Args:
        group: Of these workers: new ones, after a restart, need a new one.
        base: Version that all workers have and can change in place; None if they want the whole.
        engine: Keeps its name through restarts, so that the trainer lets go of the earlier group;
            None: it has no other group than this one.
    """
    store = open_store(meeting.host, meeting.port, meeting.timeout_s)
    request = {
        "group": group,
        "engine": engine or group,
        "world_size": 1 + num_workers,
        "base": base,
    }
    return _put_request(store, request)


def _put_request(store: Any, request: dict[str, object] | None) -> str:
    """Ask the trainer's thread; None only wakes it."""
    key = f"request/{store.add('requests', 1)}"
    store.set(key, json.dumps(request))
    return key


def _put_aside(tensor: Tensor) -> Tensor:
    """A copy; in CPU memory where the GPU has no room."""
    if tensor.is_cuda and torch.cuda.mem_get_info(tensor.device)[0] < 4 * tensor.nbytes:
        return tensor.cpu()
    return tensor.clone()
