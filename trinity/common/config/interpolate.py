"""`${...}` references -> their values, through OmegaConf; every one that fails is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trinity.common.config.nearest import nearest
from trinity.common.errors import Problem

_FORM = "Write ${a.b} for a key and ${oc.env:NAME,default} for an environment variable."
_VARIABLE = re.compile(r"Environment variable '([^']+)' not found")


def resolve(data: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """``data`` with all references replaced; a reference that fails leaves null and a problem."""
    if not any(True for _ in _references(data, "")):
        return data, []
    from omegaconf import OmegaConf

    problems: list[Problem] = []
    data = _without_malformed(data, "", problems)
    resolved = _resolve(OmegaConf.create(_with_verl_root(data)), data, "", problems)
    return resolved, problems


def _without_malformed(node: Any, prefix: str, problems: list[Problem]) -> Any:
    """``node`` with null for text that is no valid reference, such as `${a`."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    if isinstance(node, dict):
        items = node.items()
        return {k: _without_malformed(v, f"{prefix}{k}.", problems) for k, v in items}
    if isinstance(node, list):
        indexed = enumerate(node)
        return [_without_malformed(v, f"{prefix}{i}.", problems) for i, v in indexed]
    if not isinstance(node, str) or "${" not in node:
        return node
    try:
        OmegaConf.create({"text": node})
    except GrammarParseError:
        key = prefix.removesuffix(".")
        problems.append(Problem(key, f"The reference {node} is not closed.", _FORM, node))
        return None
    return node


def _with_verl_root(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` with what `trainer.trainer_config` holds at its root too.

    A pasted veRL block refers to its own keys from its own root: `${critic.ppo_epochs}`.
    """
    trainer = data.get("trainer")
    block = trainer.get("trainer_config") if isinstance(trainer, dict) else None
    if not isinstance(block, dict) or not isinstance(trainer, dict):
        return data
    inner = block.get("trainer")
    mixed = {**inner, **trainer} if isinstance(inner, dict) else trainer
    return {**block, **data, "trainer": mixed}


def _resolve(root: Any, node: Any, prefix: str, problems: list[Problem]) -> Any:
    if isinstance(node, dict):
        return {k: _resolve(root, v, f"{prefix}{k}.", problems) for k, v in node.items()}
    if isinstance(node, list):
        return [_resolve(root, v, f"{prefix}{i}.", problems) for i, v in enumerate(node)]
    if not isinstance(node, str) or "${" not in node:
        return node
    return _value(root, prefix.removesuffix("."), node, problems)


def _value(root: Any, key: str, text: str, problems: list[Problem]) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        value = OmegaConf.select(root, _omega_key(key), throw_on_missing=True)
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True)
        return value
    except RecursionError:
        problems.append(Problem(key, *_cycle(text), value=text))
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        problems.append(_problem(key, text, error, root))
    return None


def _omega_key(key: str) -> str:
    head, *rest = key.split(".")
    return head + "".join(f"[{part}]" for part in rest)


def _cycle(text: str) -> tuple[str, str]:
    return (
        f"The reference {text} leads back to itself.",
        "Write a plain value in one of the keys that refer to each other.",
    )


def _problem(key: str, text: str, error: Exception, root: Any) -> Problem:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    variable = _VARIABLE.search(said)
    if variable:
        name = variable[1]
        message = f"The environment variable {name} is not set."
        fix = f"Run `export {name}=...` first, or give a default: ${{oc.env:{name},VALUE}}."
        return Problem(key, message, fix, text)
    if "not found" in said and "key" in said.lower():
        wanted = said.split("'")[1] if "'" in said else text
        return Problem(
            key, f"The reference {text} names no key of this file.", _near(wanted, root), text
        )
    if "ecursive" in said or "cycle" in said.lower():
        return Problem(key, *_cycle(text), value=text)
    if "nsupported interpolation type" in said:
        fix = "Use ${oc.env:NAME,default} for environment variables, ${a.b} for keys."
        return Problem(key, f"The reference {text} is of an unknown kind.", fix, text)
    return Problem(key, f"The reference {text} cannot be read: {said}.", _FORM, text)


def _near(wanted: str, root: Any) -> str:
    from omegaconf import OmegaConf

    known = list(_leaves(OmegaConf.to_container(root, resolve=False), ""))
    close = nearest(wanted, known)
    return f"Did you mean ${{{close}}}?" if close else "Use the full key: ${model.model_path}."


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _leaves(value, f"{prefix}{key}.")


def _references(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _references(value, f"{prefix}{key}.")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _references(value, f"{prefix}{index}.")
    elif isinstance(node, str) and "${" in node:
        yield prefix
