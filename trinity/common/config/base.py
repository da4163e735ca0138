"""Base of every section: unknown keys are errors, `null` means "unset", numbers may be text."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from trinity.common.constants import LEAST_TEMPERATURE


class ConfigModel(BaseModel):
    """Base of every section. Field docstrings feed `docs/configuration.md`, schema and Studio."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        validate_assignment=True,
        coerce_numbers_to_str=True,
        protected_namespaces=(),
    )

    @model_validator(mode="before")
    @classmethod
    def _null_means_unset(cls, data: Any) -> Any:
        """Drop keys that are null where null is no value of the field: they keep the default."""
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        return {
            key: value
            for key, value in data.items()
            if value is not None or key not in fields or accepts_none(fields[key])
        }


def _with_digits(temperature: float | None) -> float | None:
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            "At so low a temperature logprobs are lost to rounding. Set 0 for the most likely "
            f"token, or at least {LEAST_TEMPERATURE}."
        )
    return temperature


LEAVES_DIGITS = AfterValidator(_with_digits)
"""Of a temperature: 0, or not so small that logprobs at it mean nothing."""


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; of any other annotation itself."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def without_none(annotation: Any) -> Any:
    """``annotation`` without its `| None`."""
    options = [option for option in options_of(annotation) if option is not type(None)]
    return options[0] if len(options) == 1 else annotation


def accepts_none(field: FieldInfo) -> bool:
    """Whether null is a value of this field, and not only a way to leave it out."""
    return type(None) in options_of(field.annotation) or field.annotation is Any
