"""What a trained model's checkpoint holds: copied fast, written in the background, read back."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from trinity.checkpoint import atomic, huggingface, layout
from trinity.trainer.backends.torch.optimizer import MasterOptimizer

_FORMAT = 1


@dataclass(frozen=True)
class ModelState:
    """A copy of everything a resume needs of one model, cut off from further training.

    Args:
        weights: float32 masters (and buffers) by the names of the model's ``state_dict``.
        optimizer: `MasterOptimizer.state_dict`.
        extra: Step and random state.
        model: Whose config is written; its weights are not read.
        hf_weights: Weights as the model computes with them, each once; None: not wanted.
        source: Where the tokenizer comes from.
        chat_template: Replaces the tokenizer's; None keeps it.
    """

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, object]
    extra: Mapping[str, object]
    model: PreTrainedModel
    hf_weights: Mapping[str, Tensor] | None
    source: str
    chat_template: str | None

    @classmethod
    @torch.no_grad()
    def copy_of(
        cls,
        model: PreTrainedModel,
        optimizer: MasterOptimizer,
        source: str,
        chat_template: str | None,
        hf: bool,
    ) -> "ModelState":
        names = {id(p): name for name, p in model.named_parameters()}
        copies = {n: m.detach().clone() for n, m in optimizer.masters.items()}
        weights = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            own = names.get(id(tensor), name)
            weights[name] = copies[own] if own in copies else tensor.detach().clone()
        hf_weights = None
        if hf:
            hf_weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        extra = {
            "format": _FORMAT,
            "num_steps": optimizer.num_steps,
            "rng": {"cpu": torch.get_rng_state()},
        }
        moments = _clone(optimizer.state_dict())
        return cls(weights, moments, extra, model, hf_weights, source, chat_template)  # type: ignore[arg-type]  # a dict

    def write(self, folder: Path) -> None:
        """Write all files of ``.../actor`` (one rank of one)."""
        folder.mkdir(parents=True)
        torch.save(dict(self.weights), folder / layout.shard_name("model", 1, 0))
        torch.save(dict(self.optimizer), folder / layout.shard_name("optim", 1, 0))
        torch.save(dict(self.extra), folder / layout.shard_name("extra_state", 1, 0))
        (folder / layout.FSDP_CONFIG).write_text(
            json.dumps({"FSDP_version": 2, "world_size": 1}, indent=4)
        )
        self._write_hf(folder / layout.HUGGING_FACE)

    def _write_hf(self, folder: Path) -> None:
        if Path(self.source).is_dir():
            huggingface.copy_companions(Path(self.source), folder)
        else:
            AutoTokenizer.from_pretrained(self.source).save_pretrained(folder)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(folder)
        self.model.config.save_pretrained(folder)
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template)
        if self.hf_weights is not None:
            huggingface.save_weights(self.hf_weights.items(), folder)


def load_state(
    model: PreTrainedModel, optimizer: MasterOptimizer, folder: Path, weights_only: bool
) -> None:
    """Take up weights, and unless ``weights_only`` optimizer, step and random state.

    Raises:
        ValueError: The checkpoint is of another architecture.
    """
    weights = _read(folder, "model")
    parameters = dict(model.named_parameters())
    _check_same(parameters, weights, folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
            if name in optimizer.masters:
                optimizer.masters[name].copy_(weights[name])
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
    if not weights_only:
        extra = _read(folder, "extra_state")
        optimizer.load_state_dict(_read(folder, "optim"), int(extra["num_steps"]))  # type: ignore[call-overload]  # an int
        torch.set_rng_state(extra["rng"]["cpu"])  # type: ignore[index]  # by copy_of


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread. An error comes out of `wait`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._job: Future[None] | None = None

    def begin(
        self, folder: Path, models: Mapping[str, ModelState], files: Mapping[str, str | bytes]
    ) -> None:
        """Start to write ``folder``; call `wait` before the next one."""
        self._job = self._thread.submit(_write_checkpoint, folder, models, files)

    async def wait(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            await asyncio.wrap_future(job)


def _write_checkpoint(
    folder: Path, models: Mapping[str, ModelState], files: Mapping[str, str | bytes]
) -> None:
    with atomic.writing_folder(folder) as aside:
        for name, state in models.items():
            state.write(aside / name)
        for name, text in files.items():
            (aside / name).write_bytes(text.encode() if isinstance(text, str) else text)


def _read(folder: Path, kind: str) -> dict[str, Tensor]:
    path = folder / layout.shard_name(kind, 1, 0)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _check_same(
    parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path
) -> None:
    missing = sorted(set(parameters) - set(weights))
    if missing:
        raise ValueError(
            f"{folder} is of another architecture: it has no {missing[0]} "
            f"({len(missing)} of {len(parameters)} parameters are missing)."
        )
    for name, parameter in parameters.items():
        if parameter.shape != weights[name].shape:
            raise ValueError(
                f"{folder} is of another architecture: {name} is {tuple(weights[name].shape)} "
                f"there, and {tuple(parameter.shape)} in the model."
            )


def _clone(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _clone(entry) for key, entry in value.items()}
    return [_clone(entry) for entry in value] if isinstance(value, list) else value
