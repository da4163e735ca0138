"""`KVMemory`: keys and values of all that an engine works on, a row a sample and pages a prompt."""

from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from trinity.common.models.routes import Routers, filled
from trinity.engine.torch.jobs import Job, SampleJob, SampleRows
from trinity.engine.torch.kv import GRAIN, TILE, KVRows, round_up
from trinity.engine.torch.pieces import index_tensor
from trinity.engine.torch.prompt_pages import PromptPages

_SHORT = 256  # positions of a row that are not worth growing into
_KEPT_BYTES = 2**26  # a store of this size is not worth freeing between two batches


class KVMemory:
    """Where jobs and their samples have their keys and values.

    A job has pages from `open` to `close`. A sample has the row of its number in `SampleRows`; it
    begins as a copy of its prompt.

    Routes of tokens (`trinity.common.models.routes`) lie as keys in a layer of their own, and are
    shared, copied and moved as these are.

    Args:
        max_kept_bytes: Memory that prompts may fill which are kept for later ones.
        routers: The model's, if routes are kept.
    """

    def __init__(
        self,
        num_layers: int,
        max_kept_bytes: int,
        device: torch.device,
        routers: Routers | None = None,
    ) -> None:
        self.routes_layer = num_layers
        self._routers = routers
        num_layers += routers is not None
        self.samples = KVRows(num_layers)
        self.prompts = PromptPages(num_layers, max_kept_bytes)
        self.bytes_per_token = 0.0
        """Memory of one token; 0 until the first jobs have been done with."""
        self._num_layers = num_layers
        self._device = device

    @property
    def size_bytes(self) -> int:
        return self.samples.size_bytes + self.prompts.size_bytes

    def open(self, job: Job) -> bool:
        """A place for the prompt of ``job``; False while another computes what this one needs."""
        is_shared = isinstance(job, SampleJob) and job.images is None
        job.slot = self.prompts.open(job.tokens, is_shared=is_shared)
        if job.slot is None:
            return False
        job.num_computed = job.slot.num_known
        return True

    def close(self, job: Job) -> None:
        """The prompt of ``job`` is done with."""
        if job.slot is not None:
            self.prompts.close(job.slot)
            job.slot = None

    def reserve(self, rows: SampleRows, longest: int) -> None:
        """Room for ``longest`` positions in each row; for all of short samples, to copy none."""
        end = int((rows["prompt_length"] + rows["max_tokens"]).max(initial=0))
        length = max(longest, min(end, _SHORT))
        self.samples.reserve(len(rows), round_up(length, GRAIN))

    def copy_prompts(
        self, rows: SampleRows, first: int, started: list[tuple[SampleJob, int]]
    ) -> None:
        """Fill the rows from ``first`` on, so many of each job, with their prompts."""
        if not started:
            return
        self.reserve(rows, max(len(job.tokens) for job, _ in started) + 1)
        for _, group in groupby(started, key=lambda entry: -(-len(entry[0].tokens) // TILE)):
            entries = list(group)
            pages = [job.slot.pages for job, _ in entries if job.slot is not None]
            counts = [count for _, count in entries]
            chosen = self._tensor(np.repeat(np.stack(pages), counts, axis=0))
            for layer in range(self._num_layers):
                self.samples.fill(layer, first, *self.prompts.gather(layer, chosen))
            first += len(chosen)

    def routes(self, row: int, length: int) -> Tensor | None:
        """[length, L, K] of a sample of so many tokens; the last one was never computed."""
        if self._routers is None:
            return None
        key_RHLD, _ = self.samples.view(self.routes_layer, row + 1, length - 1)
        routes = key_RHLD[row, 0].view(length - 1, self._routers.num_layers, -1)
        return filled(routes.cpu(), length)

    def remove_rows(self, rows: SampleRows, gone: np.ndarray) -> None:
        """Drop samples from ``rows``, and move keys and values as the others move."""
        length = round_up(int(rows.lengths.max(initial=0)))
        source, target = rows.remove(gone)
        if len(source):
            length = min(length, self.samples.length)
            self.samples.move(self._tensor(source), self._tensor(target), length)

    def forget_prompts(self) -> None:
        """Use no keys and values of earlier jobs any more."""
        self.prompts.forget()
        self.prompts.clear_if_empty()

    def free(self) -> None:
        """Give back what is not wanted while nothing runs."""
        self.bytes_per_token = self.bytes_per_token or self.prompts.bytes_per_token
        self.samples.clear(_KEPT_BYTES)
        self.prompts.clear_if_empty()

    def _tensor(self, values: np.ndarray) -> Tensor:
        return index_tensor(values, self._device)


def as_keys_and_values(routes_NLK: Tensor) -> tuple[Tensor, Tensor]:
    """Routes as keys of one head, and values of no size."""
    key_NHD = routes_NLK.flatten(1)[:, None]
    return key_NHD, key_NHD[..., :0]
