"""A table of rows as bytes and back: what experiences travel and rest as.

Layout (little-endian)::

    4 bytes   "TRXP"
    1 byte    format version
    4 bytes   CRC-32 of all that follows
    8 bytes   length of the header
    header    msgpack: num_rows; lengths (tensor column -> length in each row, nil: has none);
              values (value column -> value of each row; columns of nils are left out)
    rest      safetensors: "column.<name>" holds the rows of a tensor column one after the other,
              "named.<name>" a tensor of any shape

Nothing in it is ever unpickled, and bytes that are cut, altered or made up give a `ValueError`.
What the columns mean is `trinity.common.experience`.
"""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

MAGIC = b"TRXP"
FORMAT_VERSION = 3
_PREFIX = struct.Struct("<4sBIQ")
_UNCHECKED = 9  # bytes before what the CRC covers
_COLUMN, _NAMED = "column.", "named."
_NUMPY_DTYPES = {torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32}


@dataclass
class Table:
    """Rows, column by column.

    Args:
        tensors: Column name -> a 1-D tensor per row (any length), or None where a row has none.
        values: Column name -> a value of msgpack's types per row. NumPy and torch numbers are
            stored as plain ones; tuples come back as lists.
        named: Further tensors of any shape.
    """

    num_rows: int
    tensors: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    values: Mapping[str, Sequence[object]] = field(default_factory=dict)
    named: Mapping[str, Tensor] = field(default_factory=dict)


def pack(table: Table) -> bytes:
    """``table`` as bytes.

    Raises:
        TypeError: A value is of no type that can be stored, or a number beyond 64 bits.
        ValueError: A tensor column mixes dtypes, or values are nested too deep.
    """
    blobs = {f"{_NAMED}{name}": _own_copy(tensor) for name, tensor in table.named.items()}
    lengths: dict[str, list[int | None]] = {}
    for name, rows in table.tensors.items():
        present = [row for row in rows if row is not None]
        if present:
            if len({row.dtype for row in present}) > 1:
                raise ValueError(f"The rows of {name!r} differ in dtype.")
            lengths[name] = [None if row is None else row.shape[0] for row in rows]
            blobs[f"{_COLUMN}{name}"] = torch.cat(present)
    values = {
        name: rows for name, rows in table.values.items() if any(row is not None for row in rows)
    }
    header = msgpack.packb(
        {"num_rows": table.num_rows, "lengths": lengths, "values": values},
        default=_to_plain,
        unicode_errors="surrogatepass",
    )
    body = _save(blobs)
    crc = zlib.crc32(body, zlib.crc32(header, zlib.crc32(struct.pack("<Q", len(header)))))
    return b"".join([_PREFIX.pack(MAGIC, FORMAT_VERSION, crc, len(header)), header, body])


def unpack(payload: bytes) -> Table:
    """The table behind the bytes of `pack`; its tensors share no memory.

    Raises:
        ValueError: The bytes are cut, altered, foreign or of another format version.
    """
    if len(payload) < _PREFIX.size or payload[:4] != MAGIC:
        raise ValueError("These bytes are not experiences: the TRXP mark is missing.")
    _, version, crc, header_length = _PREFIX.unpack_from(payload)
    if version != FORMAT_VERSION:
        raise ValueError(f"Experiences of format {version}; this trinity reads {FORMAT_VERSION}.")
    if zlib.crc32(memoryview(payload)[_UNCHECKED:]) != crc:
        raise ValueError("The experiences are damaged: their checksum does not fit.")
    start = _PREFIX.size + header_length
    try:
        header = msgpack.unpackb(
            payload[_PREFIX.size : start],
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        return _table(header, load_tensors(payload[start:]))
    except Exception as error:  # whatever made-up bytes provoke
        raise ValueError(f"The experiences are malformed: {error!r}") from error


def _table(header: dict[str, object], blobs: dict[str, Tensor]) -> Table:
    num_rows, lengths, values = (header[key] for key in ("num_rows", "lengths", "values"))
    if not (isinstance(num_rows, int) and isinstance(lengths, dict) and isinstance(values, dict)):
        raise TypeError("the header has no rows or columns")
    tensors = {
        name: _split(name, blobs.pop(f"{_COLUMN}{name}"), rows) for name, rows in lengths.items()
    }
    for name, column in [*tensors.items(), *values.items()]:
        if not isinstance(column, list) or len(column) != num_rows:
            raise ValueError(f"column {name!r} does not have {num_rows} rows")
    named = {
        name.removeprefix(_NAMED): blob for name, blob in blobs.items() if name.startswith(_NAMED)
    }
    return Table(num_rows, tensors, values, named)


def _split(name: str, column: Tensor, lengths: list[int | None]) -> list[Tensor | None]:
    """The rows of a column, each in memory of its own, so that keeping one does not keep all."""
    present = [length for length in lengths if length is not None]
    if column.ndim != 1 or sum(present) != column.shape[0]:
        raise ValueError(f"{name!r} has shape {tuple(column.shape)} for lengths of {sum(present)}")
    pieces = iter(column.split(present)) if present else iter(())
    return [None if length is None else next(pieces).clone() for length in lengths]


def _save(blobs: Mapping[str, Tensor]) -> bytes:
    """safetensors of the blobs; by way of NumPy where it has the dtypes, three times as fast."""
    if all(blob.dtype in _NUMPY_DTYPES for blob in blobs.values()):
        return save_arrays({name: blob.numpy() for name, blob in blobs.items()})
    return save_tensors(dict(blobs))


def _own_copy(tensor: Tensor) -> Tensor:
    """``tensor`` on the CPU; safetensors refuses what shares memory with another one."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _to_plain(value: object) -> object:
    """Numbers that are not Python's own (NumPy, 0-d tensors) as plain ones."""
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"{type(value).__name__} can't be stored in an experience: {repr(value)[:200]}")
