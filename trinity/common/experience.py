"""One sampled sequence and its identity: `EID`, `Experience`, grouping and the wire form.

The wire form is a msgpack header followed by one safetensors blob: nothing in it is ever
unpickled. Assembling rows into training tensors is `trinity.trainer.batch`.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Literal

import msgpack
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

_MAGIC = b"TRXP"
_FORMAT_VERSION = 2
_HEADER = struct.Struct("<4sBQ")

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
)

Messages = list[dict[str, object]]
TruncateStatus = Literal["prompt_truncated", "response_truncated"]
GroupKey = Literal["task", "run", "step"]


@dataclass
class EID:
    """Where an experience comes from: batch / task / run / step, and a suffix that makes it unique."""

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
        prompt_length: P; must be positive, and below ``len(tokens)`` except for pairs.
        action_mask: [R] True on sampled tokens; all True if not given.
        teacher_logprobs: [R] log-probabilities of the same tokens under a teacher.
        token_versions: [R] version of the weights that sampled each token.
        custom_fields: Values of ``info`` that the trainer needs as tensors.

    Raises:
        ValueError: A length does not fit the tokens.
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
        self.info: dict[str, object] = info if info is not None else {}
        self.metrics: dict[str, float] = metrics if metrics is not None else {}
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
        self.multi_modal_inputs = multi_modal_inputs
        self.custom_fields = list(custom_fields)
        is_pair = self.chosen is not None and self.rejected is not None
        self.prompt_length = len(self.tokens) if is_pair else int(prompt_length)
        self.action_mask = _optional("action_mask", action_mask)
        self.experience_type = self._kind()
        if self.action_mask is None and not is_pair:
            is_cut = truncate_status == "prompt_truncated"
            self.action_mask = torch.full((self.response_length,), not is_cut, dtype=torch.bool)
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
        if not 0 < self.prompt_length <= len(self.tokens):
            raise ValueError(
                f"prompt_length is {self.prompt_length}, but there are {len(self.tokens)} tokens: "
                "it must be at least 1 and at most the number of tokens."
            )
        for name in TENSOR_FIELDS:
            value = getattr(self, name)
            if value is None or name in ("tokens", "chosen", "rejected"):
                continue
            if value.ndim != 1 or len(value) != self.response_length:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, but the response has "
                    f"{self.response_length} tokens ({len(self.tokens)} tokens, prompt_length "
                    f"{self.prompt_length})."
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
    """Experiences as bytes: magic, format version, length of header, header, safetensors."""
    tensors: dict[str, Tensor] = {}
    for index, experience in enumerate(experiences):
        for name in TENSOR_FIELDS:
            value = getattr(experience, name)
            if value is not None:
                tensors[f"{index}:{name}"] = value.contiguous()
        for name, value in (experience.multi_modal_inputs or {}).items():
            tensors[f"{index}:mm:{name}"] = value.contiguous()
    tensors = {name: _own_storage(value) for name, value in tensors.items()}
    header = msgpack.packb([_plain(experience) for experience in experiences], default=_to_plain)
    return _HEADER.pack(_MAGIC, _FORMAT_VERSION, len(header)) + header + save_tensors(tensors)


def deserialize_many(payload: bytes) -> list[Experience]:
    """The experiences of a payload of `serialize_many`.

    Raises:
        ValueError: The bytes are cut, foreign or of another format version.
    """
    if len(payload) < _HEADER.size or payload[:4] != _MAGIC:
        raise ValueError("These bytes are not experiences: the TRXP mark is missing.")
    _, version, header_length = _HEADER.unpack_from(payload)
    if version != _FORMAT_VERSION:
        raise ValueError(f"Experiences of format {version}; this trinity reads {_FORMAT_VERSION}.")
    start = _HEADER.size + header_length
    try:
        records = msgpack.unpackb(payload[_HEADER.size : start], strict_map_key=False)
        tensors = load_tensors(payload[start:])
    except Exception as error:
        raise ValueError(f"The experiences are damaged: {error}") from error
    parts: list[dict[str, Tensor]] = [{} for _ in records]
    media: list[dict[str, Tensor]] = [{} for _ in records]
    for key, value in tensors.items():
        index, _, name = key.partition(":")
        is_media = name.startswith("mm:")
        (media if is_media else parts)[int(index)][name.removeprefix("mm:")] = value
    return [_restore(*row) for row in zip(records, parts, media, strict=True)]


def _own_storage(value: Tensor) -> Tensor:
    owns_all = value.untyped_storage().nbytes() == value.nbytes
    return value if owns_all else value.clone()


def _plain(experience: Experience) -> dict[str, object]:
    record = {name: getattr(experience, name) for name in _PLAIN_FIELDS}
    record["eid"] = experience.eid.to_dict()
    record["is_multi_turn"] = experience.experience_type == "multi_turn"
    record["custom_fields"] = [
        [c.source_field, c.destination_field, str(c.data_type).removeprefix("torch.")]
        for c in experience.custom_fields
    ]
    return record


def _to_plain(value: object) -> object:
    """Numbers that are not Python's own (NumPy, 0-d tensors) as plain ones."""
    tolist: Callable[[], object] | None = getattr(value, "tolist", None)
    if tolist is not None:
        return tolist()
    raise TypeError(f"{type(value).__name__} can't be stored in an experience: {value!r}")


def _restore(
    record: dict[str, object], tensors: dict[str, Tensor], media: dict[str, Tensor]
) -> Experience:
    is_multi_turn = record.pop("is_multi_turn")
    fields = [CustomField(s, d, getattr(torch, t)) for s, d, t in record.pop("custom_fields")]  # type: ignore[attr-defined]
    experience = Experience(
        **record, **tensors, custom_fields=fields, multi_modal_inputs=media or None
    )  # type: ignore[arg-type]
    if not is_multi_turn and experience.experience_type == "multi_turn":
        experience.experience_type = "single_turn"
    return experience
