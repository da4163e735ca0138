"""Ranks as plain processes, called through pipes: what Ray's actors are in a run."""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import torch

from tests.trainer.backends import staged_group
from trinity.trainer.backends.torch.rank import TorchTrainRank
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.sharding import RankSettings

_LOADED_ONCE = [
    "trinity.trainer.backends.torch.rank",
    "transformers.models.llama.modeling_llama",
    "torch.distributed.fsdp",
]


def _serve(
    pipe: Connection, kind: type, settings: TorchEngineSettings, rank: RankSettings, gpu: str
) -> None:
    if settings.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if rank.backend == staged_group.NAME:
        staged_group.register()
    engine = kind(settings, None, rank)

    async def loop() -> None:
        while True:
            call = await asyncio.to_thread(pipe.recv)
            if call is None:
                return
            name, args = call
            try:
                pipe.send((await getattr(engine, name)(*args), None))
            except Exception as error:
                pipe.send((None, error))

    asyncio.run(loop())


class _StandIn:
    """One call after the other: who gives up on one leaves its answer to none of the next."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn = asyncio.Lock()

    def __getattr__(self, name: str):
        async def call(*args):
            return await asyncio.shield(self._exchange(name, args))

        return call

    async def _exchange(self, name: str, args: tuple[object, ...]) -> object:
        async with self._turn:
            self._pipe.send((name, args))
            value, error = await asyncio.to_thread(self._pipe.recv)
        if error is not None:
            raise error
        return value


@contextmanager
def rank_group(
    settings: TorchEngineSettings,
    world_size: int,
    kind: type = TorchTrainRank,
    has_children: bool = False,
    **rank: object,
) -> Iterator[RankGroup]:
    """Ranks on GPUs of their own; with ``backend="staged"`` they may share one."""
    num_gpus = max(1, torch.cuda.device_count())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LOADED_ONCE)
    pipes, processes = [], []
    for number in range(world_size):
        ours, theirs = context.Pipe()
        own = RankSettings(number, world_size, timeout_s=500, **rank)
        process = context.Process(
            target=_serve,
            args=(theirs, kind, settings, own, str(number % num_gpus)),
            daemon=not has_children,
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield RankGroup([_StandIn(pipe) for pipe in pipes], settings)
    finally:
        for process in processes:
            process.kill()
            process.join()
