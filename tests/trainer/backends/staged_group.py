"""`StagedGroup`: a process group whose tensors go through CPU memory, by gloo.

NCCL wants a GPU for each rank. With `torch.distributed`'s backend "staged" several ranks share one:
each computes on it, and what they exchange is copied to the CPU, exchanged there and copied back.
Every call ends when its result is in place, but for `send` and `recv`, which end in `wait`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed import distributed_c10d as c10d

NAME = "staged"


def register() -> None:
    """Make the backend known to `torch.distributed`, in this process."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> "StagedGroup":
    return StagedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


class StagedGroup(dist.ProcessGroup):
    """What `torch.distributed` asks of a group; reductions are sums, means, maxima and so on."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo, self._size = gloo, size

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        return c10d._world.pg_names[self]

    def barrier(self, opts: Any = None) -> Any:
        _ready()
        return self._gloo.barrier()

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        hosts = _to_host(tensors)
        self._gloo.broadcast(hosts, opts).wait()
        return _back(tensors, hosts)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        hosts = _to_host(tensors)
        for host in hosts:
            self._sum_or_so(host, opts.reduceOp)
        return _back(tensors, hosts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        hosts = _to_host(tensors)
        for host in hosts:
            self._sum_or_so(host, opts.reduceOp)
        if self.rank() != opts.rootRank:
            return _done(tensors)
        return _back(tensors, hosts)

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for targets, tensor in zip(outputs, inputs, strict=True):
            _back(targets, self._gathered(tensor))
        return _done(outputs[0])

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        whole = torch.cat([part.flatten() for part in self._gathered(tensor)])
        return _back([output], [whole.view(output.shape)])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return _done(outputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.stack(_to_host(parts))
            self._sum_or_so(whole, opts.reduceOp)
            _back([output], [whole[self.rank()]])
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        [whole] = _to_host([tensor])
        self._sum_or_so(whole, opts.reduceOp)
        return _back([output], [whole.view(self._size, *output.shape)[self.rank()]])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return _done(outputs)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Any:
        [host] = _to_host([tensor])
        found = torch.empty_like(output, device="cpu")
        self._gloo.alltoall_base(found, host, list(output_sizes), list(input_sizes)).wait()
        return _back([output], [found])

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        hosts = _to_host(inputs)
        found = [torch.empty_like(output, device="cpu") for output in outputs]
        own = self.rank()
        found[own].copy_(hosts[own])
        others = [peer for peer in range(self._size) if peer != own]
        works = [self._gloo.send([hosts[peer]], peer, 0) for peer in others]
        works += [self._gloo.recv([found[peer]], peer, 0) for peer in others]
        for work in works:
            work.wait()
        return _back(outputs, found)

    def gather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any) -> Any:
        found = self._gathered(inputs[0])
        if self.rank() != opts.rootRank:
            return _done(inputs)
        return _back(outputs[0], found)

    def scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any) -> Any:
        hosts = [_to_host(parts) for parts in inputs]
        found = [torch.empty_like(output, device="cpu") for output in outputs]
        self._gloo.scatter(found, hosts, opts).wait()
        return _back(outputs, found)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        hosts = _to_host(tensors)
        return _OnTheWay(self._gloo.send(hosts, peer, tag), hosts, [])

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        hosts = [torch.empty_like(t, device="cpu").contiguous() for t in tensors]
        return _OnTheWay(self._gloo.recv(hosts, peer, tag), hosts, tensors)

    # names of later releases of torch
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        [host] = _to_host([tensor])
        found = [torch.empty_like(host) for _ in range(self._size)]
        self._gloo.allgather([found], [host]).wait()
        return found

    def _sum_or_so(self, host: Tensor, kind: Any) -> None:
        """Reduce in place; gloo has no mean."""
        is_mean = kind == dist.ReduceOp.AVG
        options = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else kind
        self._gloo.allreduce([host], options).wait()
        if is_mean:
            host.div_(self._size)


class _OnTheWay(dist.Work):
    """A message under way. Keeps its memory until it is waited for."""

    def __init__(self, work: Any, hosts: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._hosts, self._targets = work, hosts, targets

    def wait(self, timeout: timedelta | None = None) -> bool:
        """May be called again, as NCCL's may: gloo would wait for another message."""
        if self._work is not None:
            self._work.wait()
            _back(self._targets, self._hosts if self._targets else [])
        self._work = None
        return True


def _ready() -> None:
    """Wait for all that the GPU still does, on whatever stream."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of their own, also of tensors on the CPU."""
    _ready()
    return [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]


def _back(targets: Sequence[Tensor], hosts: Sequence[Tensor]) -> Any:
    _ready()
    for target, host in zip(targets, hosts, strict=True):
        target.detach().copy_(host)
    return _done(targets)


def _done(tensors: Sequence[Tensor]) -> Any:
    """What a call gives back whose result is in place."""
    _ready()
    future: Any = torch.futures.Future()
    future.set_result(list(tensors))
    return _create_work_from_future(future)
