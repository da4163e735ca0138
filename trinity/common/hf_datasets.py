"""Columns as a Hugging Face data set and back; their meaning is `trinity.common.experience`'s.

Tensors of one axis are lists of numbers, plain values what they are. What has an inner structure
(``info``, messages) is JSON text, so that rows of any structure go together, with bytes as
``{"$bytes": <base64>}``; named tensors are safetensors.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

_PLAIN = {
    "reward": "float64",
    "prompt_length": "int64",
    "truncate_status": "string",
    "response_text": "string",
    "prompt_text": "string",
    "experience_type": "string",
}
_MEDIA = "multi_modal_inputs"
_BYTES = "$bytes"


def make_dataset(
    columns: Mapping[str, Sequence[Any]], tensors: Mapping[str, torch.dtype]
) -> Dataset:
    """A data set of ``columns``; which of them are tensors, and of what, ``tensors`` says."""
    import pyarrow
    from datasets import Dataset

    arrays = {}
    for name, rows in columns.items():
        if name in tensors:
            kind = pyarrow.list_(_arrow_type(tensors[name]))
            arrays[name] = pyarrow.array([r if r is None else r.numpy() for r in rows], kind)
        elif name in _PLAIN:
            arrays[name] = pyarrow.array(rows, _PLAIN[name])
        elif name == _MEDIA:
            packed = [None if row is None else save_tensors(row) for row in rows]
            arrays[name] = pyarrow.array(packed, pyarrow.binary())
        else:
            texts = [None if row is None else json.dumps(row, default=_packed) for row in rows]
            arrays[name] = pyarrow.array(texts, pyarrow.string())
    return Dataset(pyarrow.table(arrays))


def read_dataset(dataset: Dataset, tensors: Mapping[str, torch.dtype]) -> dict[str, list[Any]]:
    """The columns of a data set of `make_dataset`, whatever was done to its rows."""
    table: pyarrow.Table = dataset.with_format("arrow")[:]
    columns: dict[str, list[Any]] = {}
    for name in table.column_names:
        rows = table.column(name)
        if name in tensors:
            columns[name] = [_tensor(row, tensors[name]) for row in rows]
        elif name in _PLAIN:
            columns[name] = rows.to_pylist()
        elif name == _MEDIA:
            found = rows.to_pylist()
            columns[name] = [None if data is None else load_tensors(data) for data in found]
        else:
            texts = rows.to_pylist()
            columns[name] = [None if t is None else json.loads(t, object_hook=_open) for t in texts]
    return columns


def _tensor(row: Any, dtype: torch.dtype) -> Tensor | None:
    """The numbers of a list of Arrow's, bit by bit."""
    if not row.is_valid:
        return None
    return torch.tensor(row.values.to_numpy(zero_copy_only=False), dtype=dtype)


def _arrow_type(dtype: torch.dtype) -> pyarrow.DataType:
    import pyarrow

    return {
        torch.int32: pyarrow.int32(),
        torch.float32: pyarrow.float32(),
        torch.bool: pyarrow.bool_(),
    }[dtype]


def _packed(value: object) -> object:
    if isinstance(value, bytes):
        return {_BYTES: b64encode(value).decode()}
    raise TypeError(f"{value!r} ({type(value).__name__}) is nothing that JSON knows.")


def _open(found: dict[str, Any]) -> object:
    return b64decode(found[_BYTES]) if found.keys() == {_BYTES} else found
