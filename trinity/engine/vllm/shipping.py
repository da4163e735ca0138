"""From a weight ticket to files that vLLM's workers can read, and a check of what is in them."""

import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.channel import open_weights

_BUCKET_BYTES = 256 * 2**20
_SHARED_MEMORY = Path("/dev/shm")

Shapes = Mapping[str, tuple[int, ...]]


def expected_shapes(model_path: str, trust_remote_code: bool = False) -> Shapes:
    """Names and shapes of a model's weights, tied ones once, without loading them."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def ticket_files(
    ticket: WeightTicket, expected: Shapes, dtype: torch.dtype
) -> Generator[tuple[str, bool], None, None]:
    """Files with the weights of a ticket, one after the other: path, and whether it is the first.

    The file of a checkpoint is used as it is. Other weights go through shared memory in buckets:
    each file is deleted when the next one is asked for, so that a bucket is all that is added.

    Raises:
        ValueError: A name, shape or dtype is not what the engine runs, or a weight is missing.
    """
    check = Check(expected, dtype)
    if ticket.method == "checkpoint":
        path = str(ticket.payload)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                part = file.get_slice(name)
                check.take(name, tuple(part.get_shape()), _dtype_of(part.get_dtype()))
        check.finish()
        yield path, True
        return
    home = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="trinity_weights_", dir=home) as folder:
        path = str(Path(folder) / "bucket.safetensors")
        for number, bucket in enumerate(_buckets(open_weights(ticket))):
            for name, tensor in bucket.items():
                check.take(name, tuple(tensor.shape), tensor.dtype)
            save_file(bucket, path)
            yield path, number == 0
            Path(path).unlink()
        check.finish()


class Check:
    """Holds what comes against what must come."""

    def __init__(self, expected: Shapes, dtype: torch.dtype) -> None:
        self._expected, self._dtype = expected, dtype
        self._missing = set(expected)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if name not in self._missing:
            kind = "came twice" if name in self._expected else "the model does not have"
            raise ValueError(f"Weights name {name!r}, which {kind}.")
        if shape != self._expected[name] or dtype != self._dtype:
            raise ValueError(
                f"Weight {name!r} came as {dtype} {shape}, but the engine has {self._dtype} "
                f"{self._expected[name]}: send what the engine runs."
            )
        self._missing.discard(name)

    def finish(self) -> None:
        if self._missing:
            raise ValueError(
                f"{len(self._missing)} of {len(self._expected)} weights did not come: "
                f"{sorted(self._missing)[:5]}."
            )


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


def _dtype_of(name: str) -> torch.dtype:
    """A dtype by its name in a safetensors header."""
    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(
        name, torch.uint8
    )
