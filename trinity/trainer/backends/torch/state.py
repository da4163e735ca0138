"""What a trained model's checkpoint holds: copied fast, written in the background, read back."""

import asyncio
import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel

from trinity.checkpoint import atomic, huggingface, layout
from trinity.checkpoint.shards import ShardReader
from trinity.common.models.adapters import AdapterFolder
from trinity.trainer.backends.torch.optimizer import MasterOptimizer

_FORMAT = 1
Files = Mapping[str, str | bytes]


@dataclass(frozen=True)
class ModelState:
    """A copy of what one rank has to save of one model, cut off from further training.

    Args:
        weights: Its part of the float32 weights (and buffers), by the model's own names.
        optimizer: `MasterOptimizer.state_dict`.
        extra: Step and random state.
        rank, world_size: Whose part this is.
        hf: The Hugging Face folder's content; only rank 0 has one.
        adapter: The adapter's own folder; only rank 0 has one.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, object]
    extra: Mapping[str, object]
    rank: int
    world_size: int
    hf: "HuggingFaceFolder | None"
    adapter: AdapterFolder | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        optimizer: MasterOptimizer,
        hf: "HuggingFaceFolder | None",
        rank: int = 0,
        world_size: int = 1,
        adapter: AdapterFolder | None = None,
        copies: bool = True,
    ) -> "ModelState":
        """What is to be saved now; without ``copies`` nothing may change until it is written."""
        extra = {
            "format": _FORMAT,
            "num_steps": optimizer.num_steps,
            "rng": {"cpu": torch.get_rng_state()},
        }
        trained = optimizer.weights
        is_new = trained.split is not None
        weights: Mapping[str, Tensor] = held(trained.state_dict(), copies and not is_new)  # type: ignore[assignment]  # a dict
        moments: Mapping[str, object] = held(optimizer.state_dict(), copies)  # type: ignore[assignment]  # a dict
        return cls(weights, moments, extra, rank, world_size, hf, adapter)

    def writes(self, folder: Path) -> Iterator[Callable[[], None]]:
        """What writes this rank's files of a model folder, ``.../actor``; in any order."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind, content in (
            ("model", self.weights),
            ("optim", self.optimizer),
            ("extra_state", self.extra),
        ):
            path = folder / layout.shard_name(kind, self.world_size, self.rank)
            yield partial(torch.save, dict(content), path)
        if self.hf is not None:
            layout_facts = {"FSDP_version": 2, "world_size": self.world_size}
            (folder / layout.FSDP_CONFIG).write_text(json.dumps(layout_facts, indent=4))
            yield partial(self.hf.write, folder / layout.HUGGING_FACE)
        if self.adapter is not None:
            yield partial(self.adapter.write, folder / layout.LORA_ADAPTER)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """Config and tokenizer of a model, and if wanted its weights.

    Args:
        model: Whose config is written; its weights are not read.
        source: Where the tokenizer comes from.
        chat_template: Replaces the tokenizer's; None keeps it.
        weights: Weights as the model computes with them, each once; None: not wanted.
    """

    model: PreTrainedModel
    source: str
    chat_template: str | None
    weights: Mapping[str, Tensor] | None

    def write(self, folder: Path) -> None:
        """Write all files."""
        if Path(self.source).is_dir():
            huggingface.copy_companions(Path(self.source), folder)
        else:
            AutoTokenizer.from_pretrained(self.source).save_pretrained(folder)
        generation = getattr(self.model, "generation_config", None)
        if generation is not None and not (folder / "generation_config.json").exists():
            generation.save_pretrained(folder)
        config = self.model.config
        config.architectures = [type(self.model).__name__]
        config.save_pretrained(folder)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template)
        if self.weights is not None:
            huggingface.save_weights(self.weights.items(), folder)


def load_state(optimizer: MasterOptimizer, folder: Path, weights_only: bool) -> None:
    """Take up weights, and unless ``weights_only`` optimizer, step and random state.

    The checkpoint may come from any number of ranks.

    Raises:
        ValueError: The checkpoint is of another architecture.
    """
    reader = ShardReader(folder)
    weights = optimizer.weights
    shapes = {name: tuple(p.shape) for name, p in weights.saved_parameters().items()}
    reader.check_same(shapes, weights.saved_names())
    weights.load(reader.weight)
    if not weights_only:
        extra = reader.extra()
        moments = {name: reader.moments(name) for name in reader.moment_names()}
        optimizer.load_state_dict(moments, reader.num_steps())
        torch.set_rng_state(extra["rng"]["cpu"])  # type: ignore[index]  # by ModelState.of


class CheckpointWriter:
    """Writes one checkpoint at a time in the background. An error comes out of `wait`.

    Args:
        num_threads: Files that are written at the same time.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._job: Future[None] | None = None

    def begin(self, folder: Path, models: Mapping[str, ModelState], files: Files) -> None:
        """Start to write ``folder``; call `wait` before the next one."""
        self._job = self._thread.submit(_write_checkpoint, folder, models, files, self._num_threads)

    def begin_part(self, aside: Path, models: Mapping[str, ModelState]) -> None:
        """Start to write this rank's part into a folder that somebody else puts in place."""
        self._job = self._thread.submit(_write_models, aside, models, self._num_threads)

    async def wait(self) -> None:
        """Wait until all is written."""
        job, self._job = self._job, None
        if job is not None:
            await asyncio.wrap_future(job)


def _write_checkpoint(
    folder: Path, models: Mapping[str, ModelState], files: Files, num_threads: int
) -> None:
    with atomic.writing_folder(folder) as aside:
        _write_models(aside, models, num_threads)
        write_files(aside, files)


def _write_models(folder: Path, models: Mapping[str, ModelState], num_threads: int) -> None:
    """`OSError` for whatever keeps a file from being written, such as a full disk."""
    try:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="save") as threads:
            jobs = [
                threads.submit(write)
                for name, state in models.items()
                for write in state.writes(folder / name)
            ]
            for job in jobs:
                job.result()
    except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of it
        free_mb = shutil.disk_usage(folder).free / 2**20
        message = f"the checkpoint can't be written, {free_mb:.1f} MB are free ({error})"
        raise OSError(errno.EIO, message, str(folder)) from error


def write_files(folder: Path, files: Files) -> None:
    """Write small files by name."""
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def _held_once(value: object, copies: bool, known: dict[object, object]) -> object:
    """What is held of a value, or of a tensor that shares its memory (tied weights)."""
    local = getattr(value, "_local_tensor", value)
    if not isinstance(local, Tensor) or not local.numel():
        return held(value, copies)
    key = (local.data_ptr(), local.shape)
    if key not in known:
        known[key] = held(value, copies)
    return known[key]


def held(value: object, copies: bool) -> object:
    """A value with its tensors in CPU memory, copied if they are there already and it is asked."""
    if isinstance(value, DTensor):
        return DTensor(held(value._local_tensor, copies), value._spec, requires_grad=False)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copies)
    if isinstance(value, dict):
        known: dict[object, object] = {}
        return {key: _held_once(entry, copies, known) for key, entry in value.items()}
    return [held(entry, copies) for entry in value] if isinstance(value, list) else value
