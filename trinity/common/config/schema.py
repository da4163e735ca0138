"""The JSON schema of a file, with the sentence of every field."""

from __future__ import annotations

from typing import Any

from trinity.common.config.root import Config

_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}


def json_schema() -> dict[str, Any]:
    """The schema that editors complete and check with.

    A value may be written as ``${...}`` anywhere, so every typed value takes that text too.
    """
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "trinity run"
    for model in [schema, *schema.get("$defs", {}).values()]:
        properties = model.get("properties", {})
        for name, field in properties.items():
            properties[name] = _with_reference(field)
    return schema


def _with_reference(field: dict[str, Any]) -> dict[str, Any]:
    names = ("description", "default", "title")
    about: dict[str, Any] = {key: field[key] for key in names if key in field}
    rest = {key: value for key, value in field.items() if key not in about}
    if rest.get("type") in ("string", "object") or not rest:
        return field
    options = rest.pop("anyOf", None) or [rest]
    return {**about, "anyOf": [*options, _REFERENCE, {"type": "null"}]}
