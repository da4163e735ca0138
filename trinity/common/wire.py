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

import ctypes
import json
import operator
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgpack
import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

MAGIC = b"TRXP"
FORMAT_VERSION = 3
_START = struct.Struct("<4sBI")
_PREFIX = struct.Struct("<4sBIQ")
_COLUMN, _NAMED = "column.", "named."
_IS_PRESENT = partial(operator.is_not, None)
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""Names in safetensors, in its order: tensors of a later one come first, so all are aligned."""
_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES)}


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
    blobs = {f"{_NAMED}{name}": tensor for name, tensor in table.named.items()}
    lengths: dict[str, list[int | None]] = {}
    for name, rows in table.tensors.items():
        present = [row for row in rows if row is not None]
        if present:
            lengths[name] = [None if row is None else row.shape[0] for row in rows]
            blobs[f"{_COLUMN}{name}"] = _joined(name, present)
    values = {name: rows for name, rows in table.values.items() if any(map(_IS_PRESENT, rows))}
    header = msgpack.packb(
        {"num_rows": table.num_rows, "lengths": lengths, "values": values},
        default=_to_plain,
        unicode_errors="surrogatepass",
    )
    length = struct.pack("<Q", len(header))
    content = b"".join([length, header, *_safetensors(blobs)])
    return b"".join([_START.pack(MAGIC, FORMAT_VERSION, zlib.crc32(content)), content])


def _joined(name: str, rows: Sequence[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if len({row.dtype for row in rows}) > 1:
        raise ValueError(f"The rows of {name!r} differ in dtype.")
    return torch.cat(list(rows))


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
    if zlib.crc32(memoryview(payload)[_START.size :]) != crc:
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


def _safetensors(blobs: Mapping[str, Tensor]) -> list[bytes]:
    """The pieces of a safetensors file of the blobs, byte for byte as that package writes it.

    Written here because the package takes longer for one experience than all the rest together.
    """
    entries: dict[str, object] = {}
    pieces = [b"", b""]
    start = 0
    for name, blob in sorted(blobs.items(), key=_place):
        piece = _bytes_of(blob)
        end = start + len(piece)
        entries[name] = {
            "dtype": _DTYPES[blob.dtype],
            "shape": list(blob.shape),
            "data_offsets": [start, end],
        }
        pieces.append(piece)
        start = end
    header = _COMPACT.encode(entries).encode()
    header += b" " * (-len(header) % 8)
    pieces[0], pieces[1] = struct.pack("<Q", len(header)), header
    return pieces


def _place(blob: tuple[str, Tensor]) -> tuple[int, str]:
    """By what a tensor comes before others in the file."""
    name, tensor = blob
    rank = _RANKS.get(tensor.dtype)
    if rank is None:
        raise TypeError(f"{name!r} is of {tensor.dtype}, which can't be stored in an experience.")
    return -rank, name


def _bytes_of(tensor: Tensor) -> bytes:
    """The values of a tensor, as they lie in memory."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _to_plain(value: object) -> object:
    """Numbers that are not Python's own (NumPy, 0-d tensors) as plain ones."""
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"{type(value).__name__} can't be stored in an experience: {repr(value)[:200]}")
