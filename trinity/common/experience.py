"""One sampled sequence and its identity: `EID`, `Experience`, grouping and bytes.

The layout of the bytes is `trinity.common.wire`; assembling rows into training tensors is
`trinity.trainer.batch`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from trinity.common import wire
from trinity.common.constants import ROUTES

if TYPE_CHECKING:
    from datasets import Dataset  # brings pandas

#: Tensor field -> dtype it is kept in. All but ``tokens`` have one entry per response token.
TENSOR_FIELDS: dict[str, torch.dtype] = {
    "tokens": torch.int32,
    "logprobs": torch.float32,
    "token_level_reward": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "action_mask": torch.bool,
    "teacher_logprobs": torch.float32,
    "token_versions": torch.int32,
    "chosen": torch.int32,
    "rejected": torch.int32,
}
_FREE_LENGTH = ("tokens", "chosen", "rejected")
_PLAIN_FIELDS = (
    "reward",
    "truncate_status",
    "info",
    "metrics",
    "prompt_length",
    "response_text",
    "prompt_text",
    "messages",
    "tools",
    "chosen_messages",
    "rejected_messages",
    "experience_type",
)
_TENSORS_OF, _VALUES_OF = attrgetter(*TENSOR_FIELDS), attrgetter(*_PLAIN_FIELDS)

Messages = list[dict[str, object]]
TruncateStatus = Literal["prompt_truncated", "response_truncated"]
_TRUNCATE_STATUSES = get_args(TruncateStatus)
GroupKey = Literal["task", "run", "step"]


@dataclass
class EID:
    """Where an experience comes from: batch / task / run / step; a suffix makes it unique."""

    batch: int | str = ""
    task: int | str = ""
    run: int = 0
    step: int = 0
    suffix: str = field(default_factory=lambda: token_hex(3))

    @property
    def uid(self) -> str:
        """Unique id of the experience."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"

    @property
    def sid(self) -> str:
        """Step id: the same step number of all runs of a task."""
        return f"{self.batch}/{self.task}/{self.step}"

    @property
    def rid(self) -> str:
        """Run id: all steps of one run (one trajectory)."""
        return f"{self.batch}/{self.task}/{self.run}"

    @property
    def tid(self) -> str:
        """Task id: all runs of one task in one batch; the group of group-relative methods."""
        return f"{self.batch}/{self.task}"

    def to_dict(self) -> dict[str, object]:
        return {
            "batch": self.batch,
            "task": self.task,
            "run": self.run,
            "step": self.step,
            "suffix": self.suffix,
        }


@dataclass(frozen=True)
class CustomField:
    """A value of ``Experience.info`` that becomes a column of the training batch."""

    source_field: str
    destination_field: str
    data_type: torch.dtype


class Experience:
    """One sequence of tokens with what was observed of it.

    ``tokens`` holds prompt and response; every other tensor has one entry per response token,
    ``len(tokens) - prompt_length`` of them. In a multi-turn experience the response holds
    everything after the first prompt, and ``action_mask`` is True on the tokens the policy
    sampled. A preference pair keeps its prompt in ``tokens`` and its two answers in ``chosen``
    and ``rejected``.

    Args:
        tokens: [P + R] token ids.
        logprobs: [R] log-probability of each response token under the policy that sampled it.
        reward: Reward of the whole response; None if it has not been scored.
        token_level_reward: [R] reward per token, in place of ``reward``.
        advantages, returns: [R], filled in by the advantage function.
        truncate_status: None, "prompt_truncated" or "response_truncated".
        info: Free-form facts (``model_version``, ``task_index`` ...); must be msgpack types.
        metrics: Numbers logged for this rollout.
        prompt_length: P; at least 1 and at most ``len(tokens)``, which it is for pairs.
        action_mask: [R] True on sampled tokens; all True if not given.
        teacher_logprobs: [R] log-probabilities of the same tokens under a teacher.
        token_versions: [R] version of the weights that sampled each token.
        routed_experts: [P + R, layers, k] experts that each token went to in a mixture-of-experts
            model, -1 where that is not known (`trinity.common.models.routes`).
        custom_fields: Values of ``info`` that the trainer needs as tensors.

    Raises:
        ValueError: A length does not fit the tokens, or `truncate_status` is another word.
    """

    def __init__(
        self,
        *,
        tokens: Tensor | Sequence[int],
        eid: EID | dict[str, object] | None = None,
        logprobs: Tensor | Sequence[float] | None = None,
        reward: float | None = None,
        token_level_reward: Tensor | Sequence[float] | None = None,
        advantages: Tensor | Sequence[float] | None = None,
        returns: Tensor | Sequence[float] | None = None,
        truncate_status: TruncateStatus | None = None,
        info: dict[str, object] | None = None,
        metrics: dict[str, float] | None = None,
        prompt_length: int = 1,
        response_text: str | None = None,
        prompt_text: str | None = None,
        action_mask: Tensor | Sequence[bool] | None = None,
        messages: Messages | None = None,
        tools: Messages | None = None,
        chosen: Tensor | Sequence[int] | None = None,
        rejected: Tensor | Sequence[int] | None = None,
        chosen_messages: Messages | None = None,
        rejected_messages: Messages | None = None,
        teacher_logprobs: Tensor | Sequence[float] | None = None,
        token_versions: Tensor | Sequence[int] | None = None,
        routed_experts: Tensor | None = None,
        multi_modal_inputs: dict[str, Tensor] | None = None,
        custom_fields: Sequence[CustomField] = (),
    ) -> None:
        self.eid = EID(**eid) if isinstance(eid, dict) else eid or EID()  # type: ignore[arg-type]  # msgpack dict
        self.tokens = _tensor("tokens", tokens)
        self.logprobs = _optional("logprobs", logprobs)
        self.reward = None if reward is None else float(reward)
        self.token_level_reward = _optional("token_level_reward", token_level_reward)
        self.advantages = _optional("advantages", advantages)
        self.returns = _optional("returns", returns)
        self.truncate_status = truncate_status
        self.info: dict[str, object] = dict(info or {})
        self.metrics: dict[str, float] = dict(metrics or {})
        self.response_text = response_text
        self.prompt_text = prompt_text
        self.messages = messages
        self.tools = tools
        self.chosen = _optional("chosen", chosen)
        self.rejected = _optional("rejected", rejected)
        self.chosen_messages = chosen_messages
        self.rejected_messages = rejected_messages
        self.teacher_logprobs = _optional("teacher_logprobs", teacher_logprobs)
        self.token_versions = _optional("token_versions", token_versions)
        self.routed_experts = routed_experts
        self.multi_modal_inputs = multi_modal_inputs
        self.custom_fields = list(custom_fields)
        is_pair = self.chosen is not None and self.rejected is not None
        self.prompt_length = len(self.tokens) if is_pair else int(prompt_length)
        self.action_mask = _optional("action_mask", action_mask)
        self.experience_type = self._kind()
        if self.action_mask is None and not is_pair:
            is_cut = truncate_status == "prompt_truncated"
            size = max(0, self.response_length)
            self.action_mask = torch.full((size,), not is_cut, dtype=torch.bool)
        self._check()

    @property
    def response_length(self) -> int:
        """R: tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def _kind(self) -> Literal["single_turn", "multi_turn", "dpo"]:
        if self.chosen is not None and self.rejected is not None:
            return "dpo"
        return "single_turn" if self.action_mask is None else "multi_turn"

    def _check(self) -> None:
        num_tokens = len(self.tokens)
        if self.truncate_status is not None and self.truncate_status not in _TRUNCATE_STATUSES:
            raise ValueError(
                f"truncate_status is {self.truncate_status!r}; it may be None, "
                f"{' or '.join(map(repr, _TRUNCATE_STATUSES))}."
            )
        if not 0 < self.prompt_length <= num_tokens:
            raise ValueError(
                f"prompt_length is {self.prompt_length}, but there are {num_tokens} tokens: "
                "it must be at least 1 and at most the number of tokens."
            )
        response_length = num_tokens - self.prompt_length
        for name in TENSOR_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            if value.ndim != 1:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, but must be 1-D.")
            if len(value) != response_length and name not in _FREE_LENGTH:
                raise ValueError(
                    f"{name} has {len(value)} entries, but the response has {response_length} "
                    f"tokens ({num_tokens} tokens, prompt_length {self.prompt_length})."
                )
        routes = self.routed_experts
        if routes is not None and (routes.ndim != 3 or len(routes) != num_tokens):
            raise ValueError(
                f"routed_experts has shape {tuple(routes.shape)}, but must be [{num_tokens}, "
                "layers, k]: one entry for each token."
            )

    def to_dict(self) -> dict[str, object]:
        """What a person wants to read of it: ids, lengths, texts, reward; no tensors."""
        record: dict[str, object] = {
            "eid": self.eid.to_dict(),
            "type": self.experience_type,
            "prompt_length": self.prompt_length,
            "response_length": self.response_length,
            "info": self.info,
            "metrics": self.metrics,
        }
        optional = (
            "prompt_text",
            "response_text",
            "messages",
            "tools",
            "reward",
            "truncate_status",
        )
        record |= {
            name: getattr(self, name) for name in optional if getattr(self, name) is not None
        }
        return record

    def serialize(self) -> bytes:
        return serialize_many([self])

    @classmethod
    def deserialize(cls, payload: bytes) -> "Experience":
        experiences = deserialize_many(payload)
        if len(experiences) != 1:
            raise ValueError(
                f"The payload holds {len(experiences)} experiences; use deserialize_many."
            )
        return experiences[0]

    @classmethod
    def serialize_many(cls, experiences: Sequence["Experience"]) -> bytes:
        return serialize_many(experiences)

    @classmethod
    def deserialize_many(cls, payload: bytes) -> list["Experience"]:
        return deserialize_many(payload)

    def __repr__(self) -> str:
        return (
            f"Experience({self.eid.uid}, {self.experience_type}, {self.prompt_length}+"
            f"{self.response_length} tokens, reward={self.reward})"
        )


def _tensor(name: str, value: Tensor | Sequence[int] | Sequence[float] | Sequence[bool]) -> Tensor:
    dtype = TENSOR_FIELDS[name]
    if isinstance(value, Tensor):
        return value.detach().to("cpu", dtype)
    return torch.tensor(value, dtype=dtype)


def _optional(
    name: str, value: Tensor | Sequence[int] | Sequence[float] | Sequence[bool] | None
) -> Tensor | None:
    return None if value is None else _tensor(name, value)


def group_by(experiences: Iterable[Experience], id_type: GroupKey) -> dict[str, list[Experience]]:
    """Experiences by task (``tid``), run (``rid``) or step (``sid``), in order of appearance."""
    attribute = {"task": "tid", "run": "rid", "step": "sid"}[id_type]
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(getattr(experience.eid, attribute), []).append(experience)
    return groups


def split_dpo_experience_to_single_turn(experiences: Iterable[Experience]) -> list[Experience]:
    """Each pair as two rows, prompt + chosen then prompt + rejected, under one ``pair_id``."""
    rows = []
    for pair in experiences:
        if pair.chosen is None or pair.rejected is None:
            raise ValueError(f"{pair.eid.uid} has no chosen and rejected answers.")
        for run, answer in enumerate((pair.chosen, pair.rejected)):
            eid = EID(pair.eid.batch, pair.eid.task, run, pair.eid.step, pair.eid.suffix)
            tokens = torch.cat([pair.tokens, answer])
            info = {**pair.info, "pair_id": pair.eid.uid, "is_chosen": run == 0}
            rows.append(
                Experience(eid=eid, tokens=tokens, prompt_length=len(pair.tokens), info=info)
            )
    return rows


def serialize_many(experiences: Sequence[Experience]) -> bytes:
    """Experiences as bytes (`trinity.common.wire`). Tuples in ``info`` and the like become lists.

    Raises:
        TypeError: ``info``, ``metrics`` or a message holds what msgpack has no type for.
    """
    tensors = _as_columns(TENSOR_FIELDS, map(_TENSORS_OF, experiences))
    values = _as_columns(_PLAIN_FIELDS, map(_VALUES_OF, experiences))
    values["eid"] = [_pack_eid(e.eid) for e in experiences]
    values["custom_fields"] = [_pack_custom_fields(e.custom_fields) for e in experiences]
    media = {
        f"{index}.{name}": tensor
        for index, e in enumerate(experiences)
        for name, tensor in _named_tensors(e).items()
    }
    return wire.pack(wire.Table(len(experiences), tensors, values, media))


def _as_columns(names: Iterable[str], rows: Iterable[Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Name -> what each row has of it; nothing if there are no rows."""
    return dict(zip(names, zip(*rows, strict=True), strict=False))


def deserialize_many(payload: bytes) -> list[Experience]:
    """The experiences of a payload of `serialize_many`.

    Raises:
        ValueError: The bytes are cut, altered, foreign or of another format version.
    """
    table = wire.unpack(payload)
    try:
        columns = _columns(table)
        return [_restore(columns.keys(), row) for row in zip(*columns.values(), strict=True)]
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"The bytes hold something else than experiences: {error!r}") from error


def to_hf_datasets(experiences: Sequence[Experience]) -> "Dataset":
    """Experiences as a data set of Hugging Face's `datasets`, a row each; nothing is lost.

    Raises:
        TypeError: ``info``, ``metrics`` or a message holds what JSON has no type for.
    """
    from trinity.common.hf_datasets import make_dataset

    names = (*TENSOR_FIELDS, *_PLAIN_FIELDS)
    columns = {name: [getattr(e, name) for e in experiences] for name in names}
    columns["eid"] = [_pack_eid(e.eid) for e in experiences]
    columns["custom_fields"] = [_pack_custom_fields(e.custom_fields) for e in experiences]
    columns["multi_modal_inputs"] = [_named_tensors(e) or None for e in experiences]
    return make_dataset(columns, TENSOR_FIELDS)


def from_hf_datasets(dataset: "Dataset") -> list[Experience]:
    """The experiences of a data set of `to_hf_datasets`, whose rows may be chosen and ordered anew.

    Raises:
        ValueError: It is another data set, or a length does not fit the tokens.
    """
    from trinity.common.hf_datasets import read_dataset

    wanted = {*TENSOR_FIELDS, *_PLAIN_FIELDS, "eid", "custom_fields", "multi_modal_inputs"}
    missing = sorted(wanted - set(dataset.column_names))
    if missing:
        raise ValueError(
            f"The data set holds no experiences: it has no column {missing[0]!r}. "
            "`to_hf_datasets` makes such data sets."
        )
    columns = read_dataset(dataset.select_columns(sorted(wanted)), TENSOR_FIELDS)
    columns |= _by_field(columns["multi_modal_inputs"])
    columns["eid"] = [_unpack_eid(ids) for ids in columns["eid"]]
    columns["custom_fields"] = [
        _unpack_custom_fields(fields) for fields in columns["custom_fields"]
    ]
    return [_restore(columns.keys(), row) for row in zip(*columns.values(), strict=True)]


def _columns(table: wire.Table) -> dict[str, Sequence[object]]:
    """Every attribute of the experiences of ``table``, as a column."""
    none = [None] * table.num_rows
    columns: dict[str, Sequence[object]] = {}
    for name, dtype in TENSOR_FIELDS.items():
        columns[name] = rows = table.tensors.get(name, none)
        if any(row is not None and row.dtype is not dtype for row in rows):
            raise TypeError(f"{name} is not {dtype}")
    columns |= {name: table.values.get(name, none) for name in _PLAIN_FIELDS}
    columns["eid"] = [_unpack_eid(ids) for ids in table.values.get("eid", none)]
    columns["custom_fields"] = [
        _unpack_custom_fields(fields) for fields in table.values.get("custom_fields", none)
    ]
    media: list[dict[str, Tensor] | None] = [None] * table.num_rows
    for key, tensor in table.named.items():
        index, _, name = key.partition(".")
        media[int(index)] = {**(media[int(index)] or {}), name: tensor}
    return {**columns, **_by_field(media)}


def _named_tensors(experience: Experience) -> dict[str, Tensor]:
    """Tensors of other shapes than one entry per token."""
    media, routes = experience.multi_modal_inputs or {}, experience.routed_experts
    return media if routes is None else {**media, ROUTES: routes}


def _by_field(
    named: Sequence[dict[str, Tensor] | None],
) -> dict[str, list[dict[str, Tensor] | None] | list[Tensor | None]]:
    """What `_named_tensors` put together, as columns of attributes."""
    media = [{n: t for n, t in (row or {}).items() if n != ROUTES} or None for row in named]
    return {"multi_modal_inputs": media, ROUTES: [(row or {}).get(ROUTES) for row in named]}


def _restore(names: Iterable[str], values: Sequence[object]) -> Experience:
    """An experience with these attributes; only lengths are checked again."""
    experience = Experience.__new__(Experience)
    vars(experience).update(zip(names, values, strict=True))
    if not (isinstance(experience.info, dict) and isinstance(experience.metrics, dict)):
        raise TypeError("info and metrics must be mappings")
    experience._check()
    return experience


def _pack_eid(eid: EID) -> list[int | str]:
    return [eid.batch, eid.task, eid.run, eid.step, eid.suffix]


def _unpack_eid(ids: Any) -> EID:
    batch, task, run, step, suffix = ids
    return EID(batch, task, run, step, suffix)


def _pack_custom_fields(fields: Sequence[CustomField]) -> list[list[str]] | None:
    return [
        [c.source_field, c.destination_field, str(c.data_type).removeprefix("torch.")]
        for c in fields
    ] or None


def _unpack_custom_fields(packed: Any) -> list[CustomField]:
    fields = [CustomField(s, d, getattr(torch, t)) for s, d, t in packed or ()]
    if not all(isinstance(c.data_type, torch.dtype) for c in fields):
        raise TypeError("a custom field names no dtype")
    return fields
