"""Rows of experience as tensors: `TrainBatch`, what a training engine works on.

Shape suffixes: B = rows (one experience each), T = response tokens (padded to the longest).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from trinity.common.constants import ROUTES
from trinity.common.experience import Experience, split_dpo_experience_to_single_turn
from trinity.common.models.prompts import require_bounds_known
from trinity.common.models.routes import DTYPE as ROUTES_DTYPE
from trinity.common.models.routes import UNKNOWN
from trinity.common.models.vision import PIXELS

_NAMED = 3  # rows that a message names
#: Field of an experience -> name of its column, both [B, T].
_RESPONSE_FIELDS = {
    "action_mask": "action_mask",
    "logprobs": "old_logprob",
    "advantages": "advantages",
    "returns": "returns",
    "teacher_logprobs": "teacher_logprobs",
    "token_versions": "token_versions",
}


class TrainBatch:
    """Token ids of every row, and named columns: [B, T] per response token or [B] per row.

    Always there: ``action_mask`` [B, T] (True on tokens to train on), ``prompt_length``,
    ``group_id`` (equal for rows of one task) and ``run_id`` (equal for rows of one trajectory),
    all [B]. ``old_logprob``, ``advantages``, ``returns``, ``teacher_logprobs``,
    ``token_level_scores`` (the reward) are there if every row has them, ``pair_id`` and
    ``is_chosen`` if the rows are preference pairs, and columns of the experiences' custom fields.

    Batches are values: methods return new ones. They pickle as safetensors.
    """

    def __init__(self, tokens: Tensor, lengths: Tensor, columns: Mapping[str, Tensor]) -> None:
        self.tokens = tokens
        """Token ids of all rows, one after the other."""
        self.lengths = lengths
        """[B] number of tokens of each row, prompt included."""
        self._columns = dict(columns)

    @classmethod
    def from_experiences(cls, experiences: Sequence[Experience]) -> "TrainBatch":
        """Experiences as a batch, in their order; a preference pair becomes two rows."""
        rows = [row for e in experiences for row in _as_rows(e)]
        if not rows:
            raise ValueError("A training batch needs at least one experience; there are none.")
        columns = {
            "prompt_length": torch.tensor([row.prompt_length for row in rows]),
            "group_id": _ids([row.eid.tid for row in rows]),
            "run_id": _ids([row.eid.rid for row in rows]),
            **_response_columns(rows),
            **_info_columns(rows),
            **_custom_columns(rows),
            **_image_columns(rows),
            **_route_columns(rows),
        }
        tokens = torch.cat([row.tokens for row in rows])
        return cls(tokens, torch.tensor([len(row.tokens) for row in rows]), columns)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._columns:
            raise KeyError(
                f"The batch has no column {name!r}; it has {', '.join(sorted(self._columns))}. "
                "A column is there only if every experience has that field."
            )
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    def columns(self) -> dict[str, Tensor]:
        """All columns by name."""
        return dict(self._columns)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, prompts and responses."""
        return len(self.tokens)

    @property
    def num_trained_tokens(self) -> int:
        return int(self["action_mask"].sum())

    @property
    def response_lengths(self) -> Tensor:
        """[B] tokens after the prompt."""
        return self.lengths - self["prompt_length"]

    def row_tokens(self) -> list[Tensor]:
        """Token ids of each row."""
        return list(self.tokens.split(self.lengths.tolist()))

    def require_tokens_below(self, vocabulary_size: int) -> None:
        """`ValueError` for a token that a model does not have: kernels would read past its end."""
        if self.num_tokens:
            least, most = (int(bound) for bound in self.tokens.aminmax())
            require_bounds_known(least, most, vocabulary_size)

    def with_columns(self, **columns: Tensor) -> "TrainBatch":
        """The same rows with further, or replaced, columns."""
        for name, column in columns.items():
            if len(column) != len(self):
                raise ValueError(f"{name} has {len(column)} rows, the batch {len(self)}.")
        return TrainBatch(self.tokens, self.lengths, {**self._columns, **columns})

    def without(self, name: str) -> "TrainBatch":
        """The same rows without a column, which need not be there."""
        columns = {n: column for n, column in self._columns.items() if n != name}
        return TrainBatch(self.tokens, self.lengths, columns)

    def select(self, rows: Sequence[int] | Tensor) -> "TrainBatch":
        """The given rows, in that order, padded to the longest response among them."""
        index = torch.as_tensor(rows, dtype=torch.long)
        parts = self.row_tokens()
        chosen = [parts[i] for i in index.tolist()]
        tokens = torch.cat(chosen) if chosen else self.tokens[:0]
        columns = {name: column[index] for name, column in self._columns.items()}
        width = int(self.response_lengths[index].max()) if len(index) else 0
        columns = {n: c[:, :width] if c.ndim == 2 else c for n, c in columns.items()}
        return TrainBatch(tokens, self.lengths[index], columns)

    def units(self) -> list[list[int]]:
        """Rows that must stay in one mini-batch and one micro-batch: each alone, or its pair."""
        if "pair_id" not in self:
            return [[row] for row in range(len(self))]
        pairs: dict[int, list[int]] = {}
        for row, pair in enumerate(self["pair_id"].tolist()):
            pairs.setdefault(pair, []).append(row)
        return list(pairs.values())

    def summary(self) -> dict[str, float]:
        """Lengths of prompts and responses, tokens, known routes: metrics of the training step."""
        metrics = {"perf/total_num_tokens": float(self.num_tokens)}
        for name, length_B in (
            ("prompt_length", self["prompt_length"]),
            ("response_length", self.response_lengths),
        ):
            metrics[f"{name}/mean"] = float(length_B.float().mean())
            metrics[f"{name}/max"] = float(length_B.max())
            metrics[f"{name}/min"] = float(length_B.min())
        if ROUTES in self:
            is_known = (self[ROUTES] != UNKNOWN).any(-1).any(-1)
            metrics["routes/known_share"] = float(is_known.sum()) / self.num_tokens
        return metrics

    def to_bytes(self) -> bytes:
        tensors = {"tokens": self.tokens, "lengths": self.lengths}
        tensors |= {f"column:{name}": column for name, column in self._columns.items()}
        return save_tensors({name: t.contiguous().clone() for name, t in tensors.items()})

    @classmethod
    def from_bytes(cls, payload: bytes) -> "TrainBatch":
        tensors = load_tensors(payload)
        tokens, lengths = tensors.pop("tokens"), tensors.pop("lengths")
        return cls(tokens, lengths, {n.removeprefix("column:"): t for n, t in tensors.items()})

    def __reduce__(self) -> tuple[Callable[[bytes], "TrainBatch"], tuple[bytes]]:
        return TrainBatch.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"TrainBatch({len(self)} rows, {self.num_tokens} tokens, {sorted(self._columns)})"


def _as_rows(experience: Experience) -> list[Experience]:
    """The rows of an experience; of a pair with an empty answer none is trained on."""
    if experience.experience_type != "dpo":
        return [experience]
    rows = split_dpo_experience_to_single_turn([experience])
    if not all(row.response_length for row in rows):
        for row in rows:
            row.action_mask = torch.zeros(row.response_length, dtype=torch.bool)
    return rows


def _ids(keys: Sequence[object]) -> Tensor:
    """[B] int64: equal keys get equal numbers, counted in order of appearance."""
    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])


def _pad(values: Sequence[Tensor], width: int) -> Tensor:
    """[B, T] rows of different lengths, with zeros behind."""
    padded = values[0].new_zeros(len(values), width)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


def _response_columns(rows: Sequence[Experience]) -> dict[str, Tensor]:
    width = max(row.response_length for row in rows)
    columns = {}
    for field, name in _RESPONSE_FIELDS.items():
        values = [getattr(row, field) for row in rows]
        if all(value is not None for value in values):
            columns[name] = _pad(values, width)
    rewards = [_token_rewards(row) for row in rows]
    if all(reward is not None for reward in rewards):
        columns["token_level_scores"] = _pad([r for r in rewards if r is not None], width)
    return columns


def _token_rewards(row: Experience) -> Tensor | None:
    """[R] reward per token: the row's own, or the scalar on the last token that is trained on."""
    if row.token_level_reward is not None:
        return row.token_level_reward
    if row.reward is None:
        return None
    rewards = torch.zeros(row.response_length)
    trained = torch.zeros(0) if row.action_mask is None else row.action_mask.nonzero()
    if len(trained):
        rewards[int(trained[-1])] = row.reward
    return rewards


def _info_columns(rows: Sequence[Experience]) -> dict[str, Tensor]:
    """What ``info`` says about whole rows: pairs, and temperatures, 0 where it tells none."""
    columns = {}
    if all("pair_id" in row.info for row in rows):
        columns["pair_id"] = _ids([row.info["pair_id"] for row in rows])
        columns["is_chosen"] = torch.tensor([bool(row.info["is_chosen"]) for row in rows])
    heats = [float(row.info.get("temperature") or 0) for row in rows]  # type: ignore[arg-type]  # numbers
    if any(heats):
        columns["temperature"] = torch.tensor(heats)
    return columns


def _image_columns(rows: Sequence[Experience]) -> dict[str, Tensor]:
    """``pixel_values`` [B, images, C, H, W], if the rows have images: then all as many."""
    images = [(row.multi_modal_inputs or {}).get(PIXELS) for row in rows]
    found = [image for image in images if image is not None]
    if not found:
        return {}
    shapes = {tuple(image.shape) for image in found}
    if len(found) < len(rows) or len(shapes) > 1:
        raise ValueError(
            f"Of {len(rows)} rows {len(found)} have images, of shapes {sorted(shapes)}: all rows "
            "of a training batch must have the same number of images."
        )
    return {PIXELS: torch.stack(found)}


def _route_columns(rows: Sequence[Experience]) -> dict[str, Tensor]:
    """``routed_experts`` [B, tokens, layers, k], if any row tells them; `UNKNOWN` elsewhere."""
    shapes = {tuple(e.routed_experts.shape[1:]) for e in rows if e.routed_experts is not None}
    if not shapes:
        return {}
    if len(shapes) > 1:
        raise ValueError(
            f"Rows of a training batch have routed_experts of other models: {sorted(shapes)} "
            "layers and experts of a token."
        )
    size = (len(rows), max(len(row.tokens) for row in rows), *shapes.pop())
    routes = torch.full(size, UNKNOWN, dtype=ROUTES_DTYPE)
    for place, row in zip(routes, rows, strict=True):
        if row.routed_experts is not None:
            place[: len(row.tokens)] = row.routed_experts
    return {ROUTES: routes}


def _custom_columns(rows: Sequence[Experience]) -> dict[str, Tensor]:
    """Columns of the custom fields, which must be the same on every row."""
    fields = {c.destination_field: c for c in rows[0].custom_fields}
    for row in rows:
        names = {c.destination_field for c in row.custom_fields}
        if names != set(fields):
            raise ValueError(
                f"{row.eid.uid} has the custom fields {sorted(names)}, but {rows[0].eid.uid} has "
                f"{sorted(fields)}: all experiences of a batch must have the same."
            )
    columns = {}
    for name, field in fields.items():
        values = [torch.as_tensor(r.info[field.source_field], dtype=field.data_type) for r in rows]
        width = max(v.numel() for v in values)
        is_scalar = all(v.ndim == 0 for v in values)
        columns[name] = torch.stack(values) if is_scalar else _pad(values, width)
    return columns


def infinite_columns(batch: TrainBatch) -> str:
    """Which columns are not finite on trained tokens, and in which rows; "" if all are."""
    mask_BT, found = batch["action_mask"], []
    for name, column in batch.columns().items():
        if column.is_floating_point() and column.shape == mask_BT.shape:
            rows = (~column.isfinite() & mask_BT).any(dim=1).nonzero().flatten().tolist()
            if rows:
                more = ", ..." if len(rows) > _NAMED else ""
                which = ", ".join(map(str, rows[:_NAMED]))
                found.append(f"{name} is not finite in row {which}{more}")
    return ", ".join(found)
