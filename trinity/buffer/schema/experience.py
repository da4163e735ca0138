"""Rows that are experiences already: what a run wrote as JSON lines."""

import base64
import binascii
from collections.abc import Mapping

from trinity.buffer.rows import Row
from trinity.buffer.schema.messages import RowFault
from trinity.common.config.buffer import FormatConfig
from trinity.common.experience import EID, Experience

PAYLOAD_KEY = "experience_bytes"
_FIELDS = ("logprobs", "action_mask", "advantages", "returns", "token_level_reward")


class SavedExperienceFormatter:
    """Reads an experience back: from its exact bytes if the row has them, else from its lists."""

    def __init__(self, *_: object) -> None: ...

    @classmethod
    def required_keys(cls, config: FormatConfig) -> dict[str, str]:
        return {}

    @classmethod
    def check(cls, row: Row, config: FormatConfig) -> None:
        cls().format(row)

    def format(self, row: Row) -> Experience:
        payload = row.get(PAYLOAD_KEY)
        if isinstance(payload, str):
            try:
                payload = base64.b64decode(payload, validate=True)
            except binascii.Error as error:
                raise RowFault(PAYLOAD_KEY, f"not base64 ({error})") from None
        try:
            if isinstance(payload, bytes):
                return Experience.deserialize(payload)
            return _from_lists(row)
        except ValueError as error:
            raise RowFault(PAYLOAD_KEY if payload else "tokens", str(error)) from None


def _from_lists(row: Row) -> Experience:
    tokens, length = row.get("tokens"), row.get("prompt_length")
    if not isinstance(tokens, list) or not isinstance(length, int):
        raise RowFault("tokens", f"the row has neither {PAYLOAD_KEY} nor tokens, prompt_length")
    eid = row.get("eid")
    given = {name: row[name] for name in _FIELDS if row.get(name) is not None}
    texts = {name: row.get(name) for name in ("prompt_text", "response_text")}
    return Experience(
        tokens=tokens,
        prompt_length=length,
        eid=EID(**eid) if isinstance(eid, Mapping) else None,
        reward=row.get("reward"),  # type: ignore[arg-type]  # checked by Experience
        info=dict(row.get("info") or {}),  # type: ignore[call-overload]  # an object
        metrics=dict(row.get("metrics") or {}),  # type: ignore[call-overload]  # an object
        **given,  # type: ignore[arg-type]  # checked by Experience
        **texts,  # type: ignore[arg-type]  # texts
    )


def to_row(experience: Experience) -> Row:
    """The experience as a line a person can read, with its exact bytes as base64."""
    payload = base64.b64encode(experience.serialize()).decode("ascii")
    return {**experience.to_dict(), PAYLOAD_KEY: payload}
