"""Each thing that the group in `staged_group` exchanges, between two processes on the CPU."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from tests.trainer.backends import staged_group

OWN = {0: torch.arange(4.0), 1: torch.arange(4.0) * 10}
"""What each rank has."""


def all_reduce(rank: int, group: object = None) -> Tensor:
    own = OWN[rank].bfloat16()
    dist.all_reduce(own, group=group)
    return own.float()


def mean(rank: int) -> Tensor:
    own = OWN[rank].clone()
    assert dist.all_reduce(own, dist.ReduceOp.AVG, async_op=True).wait()
    return own


def largest(rank: int) -> Tensor:
    own = OWN[rank].flip(0)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own


def in_a_group_of_its_own(rank: int) -> Tensor:
    return all_reduce(rank, dist.new_group([0, 1]))


def broadcast(rank: int) -> Tensor:
    own = OWN[rank].clone()
    dist.broadcast(own, 1)
    return own


def every_other_place(rank: int) -> Tensor:
    """A tensor that is not contiguous."""
    wide = OWN[rank].repeat_interleave(2)
    dist.broadcast(wide[::2], 1)
    return wide[::2].clone()


def all_gather(rank: int) -> Tensor:
    found = [torch.empty(4), torch.empty(4)]
    dist.all_gather(found, OWN[rank])
    return torch.cat(found)


def all_gather_into_one(rank: int) -> Tensor:
    found = torch.empty(2, 4)
    dist.all_gather_into_tensor(found, OWN[rank])
    return found.flatten()


def reduce_scatter(rank: int) -> Tensor:
    found = torch.empty(2)
    dist.reduce_scatter_tensor(found, OWN[rank].clone())
    return found


def reduce_scatter_of_parts(rank: int) -> Tensor:
    found = torch.empty(2)
    dist.reduce_scatter(found, list(OWN[rank].chunk(2)))
    return found


def several_at_once(rank: int) -> Tensor:
    """As Megatron's gradients and weights go."""
    own, parts, wholes = OWN[rank].clone(), torch.empty(2, 1), torch.empty(2, 2)
    with dist._coalescing_manager(async_ops=True) as manager:
        for piece, part in zip(own.chunk(2), parts, strict=True):
            dist.reduce_scatter_tensor(part, piece)
    manager.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        for part, whole in zip(parts, wholes, strict=True):
            dist.all_gather_into_tensor(whole, part)
    manager.wait()
    return wholes.flatten()


def all_to_all(rank: int) -> Tensor:
    """Rank 0 sends one number to itself and three to rank 1, which sends two to each."""
    sizes = [[1, 3], [2, 2]]
    found = torch.empty(sizes[0][rank] + sizes[1][rank])
    dist.all_to_all_single(found, OWN[rank], [sizes[0][rank], sizes[1][rank]], sizes[rank])
    return found


def all_to_all_lists(rank: int) -> Tensor:
    found = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(found, list(OWN[rank].chunk(2)))
    return torch.cat(found)


def reduce_to_the_second(rank: int) -> Tensor:
    own = OWN[rank].clone()
    dist.reduce(own, 1)
    return own


def gather_and_scatter(rank: int) -> Tensor:
    found = [torch.empty(4), torch.empty(4)] if rank == 1 else None
    dist.gather(OWN[rank], found, dst=1)
    own = torch.empty(4)
    dist.scatter(own, found[::-1] if found else None, src=1)
    return own


def objects(rank: int) -> Tensor:
    found: list[object] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    dist.barrier()
    return torch.tensor([float(entry["rank"]) for entry in found])  # type: ignore[index]


def both_ways_at_once(rank: int) -> Tensor:
    found = torch.empty(4)
    send = dist.P2POp(dist.isend, OWN[rank], 1 - rank)
    receive = dist.P2POp(dist.irecv, found, 1 - rank)
    for work in 2 * dist.batch_isend_irecv([send, receive]):
        work.wait()
    return found


def one_after_the_other(rank: int) -> Tensor:
    if rank == 0:
        dist.send(OWN[0], 1)
        return OWN[0]
    found = torch.empty(4)
    dist.recv(found, 0)
    return found


TOTAL = torch.tensor([0.0, 11, 22, 33])
WANTED: dict[Callable[[int], Tensor], tuple[list[float], list[float]]] = {
    all_reduce: (TOTAL.tolist(), TOTAL.tolist()),
    mean: ((TOTAL / 2).tolist(), (TOTAL / 2).tolist()),
    largest: ([30, 20, 10, 0], [30, 20, 10, 0]),
    in_a_group_of_its_own: (TOTAL.tolist(), TOTAL.tolist()),
    broadcast: ([0, 10, 20, 30], [0, 10, 20, 30]),
    every_other_place: ([0, 10, 20, 30], [0, 10, 20, 30]),
    all_gather: ([0, 1, 2, 3, 0, 10, 20, 30], [0, 1, 2, 3, 0, 10, 20, 30]),
    all_gather_into_one: ([0, 1, 2, 3, 0, 10, 20, 30], [0, 1, 2, 3, 0, 10, 20, 30]),
    reduce_scatter: ([0, 11], [22, 33]),
    reduce_scatter_of_parts: ([0, 11], [22, 33]),
    several_at_once: (TOTAL.tolist(), TOTAL.tolist()),
    all_to_all: ([0, 0, 10], [1, 2, 3, 20, 30]),
    all_to_all_lists: ([0, 1, 0, 10], [2, 3, 20, 30]),
    reduce_to_the_second: ([0, 1, 2, 3], TOTAL.tolist()),
    gather_and_scatter: ([0, 10, 20, 30], [0, 1, 2, 3]),
    objects: ([0, 1], [0, 1]),
    both_ways_at_once: ([0, 10, 20, 30], [0, 1, 2, 3]),
    one_after_the_other: ([0, 1, 2, 3], [0, 1, 2, 3]),
}


def run(rank: int, place: str, results: object) -> None:
    staged_group.register()
    limit = timedelta(seconds=60)
    dist.init_process_group("staged", f"file://{place}", limit, world_size=2, rank=rank)
    for exchange in WANTED:
        results.put((exchange.__name__, rank, exchange(rank).tolist()))  # type: ignore[attr-defined]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[float]]:
    place = str(tmp_path_factory.mktemp("ranks") / "meeting")
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(run, (place, results), nprocs=2)
    told = {}
    while not results.empty():
        name, rank, values = results.get()
        told[name, rank] = values
    return told


@pytest.mark.parametrize("exchange", list(WANTED), ids=lambda exchange: exchange.__name__)
def test_two_ranks_exchange(found, exchange):
    assert (found[exchange.__name__, 0], found[exchange.__name__, 1]) == WANTED[exchange]
