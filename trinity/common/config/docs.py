"""Pages and schema made from the models: `python -m trinity.common.config.docs`.

Writes `docs/configuration.md`, `docs/verl_keys.md` and `trinity.schema.json` below a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trinity.common.config.algorithm_table import ALGORITHMS
from trinity.common.config.base import options_of, without_none
from trinity.common.config.old_names import ENGINES, KEYS, MOVED, REMOVED, VALUES
from trinity.common.config.root import Config, StageConfig
from trinity.common.config.schema import json_schema
from trinity.common.config.verl.keys import VERL_KEYS, Use, VerlKey
from trinity.common.config.verl.launch_table import IMPORTS

_INTRO = """\
# Configuration

One YAML file describes a run: `trinity run --config FILE`. This page lists every key. It is made
from the code by `python -m trinity.common.config.docs`; a test holds it to the code.

`trinity validate FILE` shows all that is wrong with a file, `trinity explain FILE` what a step of
the run is made of. These three take the file first or by `--config`. With what `trinity schema >
trinity.schema.json` writes editors complete keys, given this line at the top of a file:

```yaml
# yaml-language-server: $schema=trinity.schema.json
```

## How a file is read

- **References.** `${model.model_path}` is the value of another key; `${oc.env:NAME,default}` an
  environment variable. Inside `trainer.trainer_config` a reference may also start at that block:
  `${critic.ppo_epochs}`.
- **Arguments.** `trinity run --config FILE buffer.batch_size=8 trainer.total_steps=20` sets keys
  over those of the file, before references are followed. List items count from 0:
  `buffer.explorer_input.eval_tasksets.0.path=...`.
- **Unset.** A key that is left out, or `null`, or the word `None`, is worked out from the others
  where the table says how. What was worked out is logged once, with the reason.
- **Numbers** may be written `1e-6` anywhere. **Choices** are read in any case: `NCCL`, `nccl`.
- **Mistakes.** An unknown key, a wrong type, or a value that contradicts another is an error that
  names the key, its line, and what to do.
"""
_STAGES = """\
## stages

Several runs in a row. A stage takes over what it does not say, key by key, with three exceptions: a
taskset or buffer replaces the file's as a whole; another `algorithm_type` brings its own components
(the optimizer stays); and a sync method for two sides does not bind a stage with one. Each stage
starts from the Hugging Face model of the one before; a finished stage is skipped when the run is
started again. The name of the stage is added to the name of the experiment.
"""
_ALGORITHMS = """\
## Defaults by algorithm

What `algorithm_type` puts into the keys of `algorithm` that are unset. `kl_penalty_fn` is `none`
for all of them.
"""
_OLD = """\
## Old spellings

These load, with one note naming the new spelling.
"""
_REMOVED = """\
## Keys that are gone
"""
_VERL_INTRO = """\
# Keys of veRL

This page is made from the code by `python -m trinity.common.config.docs`.

## In `trainer.trainer_config`

The block may be wrapped (`actor_rollout_ref:`, `critic:`, `trainer:`) or flat (`actor:`, `ref:`,
`model:`). No key of it is swallowed: each is applied, or goes to the key of ours that means the
same, or is refused with the reason. Where both keys are given and differ, that is an error naming
both. *torch* is `trainer_type: torch`, *verl* is `trainer_type: verl`. A key that is not listed is
refused by torch and handed on by verl.
"""
_VERL_IMPORT = """\
## In a launch command

What `trinity import-verl` makes of the arguments of `python3 -m verl.trainer.main_ppo`. Keys of
the table above that are missing here go to `trainer.trainer_config`.
"""


def configuration_page() -> str:
    """The text of `docs/configuration.md`."""
    parts = [_INTRO, "## Global\n", _table(Config)]
    for name, field in Config.model_fields.items():
        model = _section(field)
        if model is not None and name != "stages":
            parts += list(_section_parts(name, model, 2, str(field.description)))
    parts += [_STAGES, _table(StageConfig)]
    parts += [_ALGORITHMS, _algorithm_table()]
    parts += [_OLD, _old_table(), _REMOVED, _removed_table()]
    return "\n".join(parts)


def _section_parts(name: str, model: type[BaseModel], level: int, sentence: str) -> Iterator[str]:
    yield f"{'#' * level} {name}\n"
    yield f"{_flat(sentence)}\n"
    yield _table(model)
    for field_name, field in model.model_fields.items():
        inner = _section(field)
        repeats = field_name in ("format", "data_selector") and "trainer_input" in name
        if inner is None or repeats or inner.__name__ in _SHOWN_ELSEWHERE.get(field_name, ()):
            continue
        key = f"{name}.{field_name}{_suffix(field)}"
        yield from _section_parts(key, inner, min(level + 1, 4), str(inner.__doc__))


_SHOWN_ELSEWHERE = {
    "tasksets": ("TasksetConfig",),
    "eval_tasksets": ("TasksetConfig",),
    "auxiliary_models": ("InferenceModelConfig",),
    "auxiliary_buffers": ("ExperienceBufferConfig",),
    "output": ("TasksetConfig", "ExperienceBufferConfig"),
    "inputs": ("ExperienceBufferConfig",),
    "external_model_config": ("ExternalModelConfig",),
}
"""Sections that have the fields of another one, which the page shows once."""


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section class of ``field``, of its items if it is a list or mapping of sections."""
    for annotation in (without_none(field.annotation), *get_args(without_none(field.annotation))):
        inner = without_none(annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return inner
    return None


def _suffix(field: FieldInfo) -> str:
    origin = get_origin(without_none(field.annotation))
    return {list: "[]", dict: ".<name>"}.get(origin, "")  # type: ignore[arg-type]


def _table(model: type[BaseModel]) -> str:
    rows = [("key", "type", "default", "meaning")]
    for name, field in model.model_fields.items():
        default = _default(field)
        meaning = _flat(field.description or "")
        rows.append((f"`{name}`", _type(field.annotation), default, meaning))
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines) + "\n"


def _flat(text: str) -> str:
    return " ".join(text.split())


_WORDS = {int: "integer", float: "number", str: "text", bool: "true/false", Any: "any"}


def _type(annotation: Any) -> str:
    inner = without_none(annotation)
    origin, arguments = get_origin(inner), get_args(inner)
    if inner in _WORDS:
        return _WORDS[inner]
    if origin is Literal:
        return ", ".join(f"`{item}`" for item in arguments)
    if len(options_of(inner)) > 1:
        return " or ".join(_type(item) for item in arguments if item is not type(None))
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping of {_type(arguments[1])}"
    if isinstance(inner, type) and issubclass(inner, Enum):
        return ", ".join(f"`{item.value}`" for item in inner)
    return "section"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        value = list(value)
    return f"`{value}`" if value != "" else "empty"


def _algorithm_table() -> str:
    columns = ("advantage_fn", "policy_loss_fn", "kl_loss_fn", "entropy_loss_fn")
    more = ("sample_strategy", "repeat_times", "loss_agg_mode")
    rows = [["algorithm_type", *columns, *more, "critic", "mode"]]
    for name, spec in ALGORITHMS.items():
        cells = [getattr(spec, column) for column in (*columns, *more)]
        modes = "train" if len(spec.modes) == 1 else "any"
        shown = ["" if cell is None else f"`{cell}`" for cell in cells]
        rows.append([f"`{name}`", *shown, "yes" if spec.use_critic else "", modes])
    return _markdown(rows)


def _old_table() -> str:
    rows = [["key", "old", "new"]]
    for key, names in VALUES.items():
        rows += [[f"`{key}`", f"`{old}`", f"`{new}`"] for old, new in names.items()]
    engines = [*ENGINES.items(), ("vllm_async", "vllm")]
    rows += [["`engine_type`", f"`{old}`", f"`{new}`"] for old, new in engines]
    for key, new in KEYS.items():
        parent, _, old = key.rpartition(".")
        rows.append([f"`{parent.replace('.*', '[]')}`", f"`{old}`", f"`{new}`"])
    for old, moved in MOVED.items():
        parent, _, name = old.rpartition(".")
        rows.append([f"`{parent}`", f"`{name}`", f"`{moved.removeprefix(parent + '.')}`"])
    rows.append(["`buffer`", "`explorer_output`", "`trainer_input.experience_buffer`"])
    return _markdown(rows)


def _removed_table() -> str:
    rows = [["key", "why", "instead"]]
    rows += [[f"`{key}`", why, fix] for key, (why, fix) in REMOVED.items()]
    return _markdown(rows)


def verl_page() -> str:
    """The text of `docs/verl_keys.md`."""
    rows = [["key", "torch", "verl", "our key", "note"]]
    for key, entry in sorted(VERL_KEYS.items()):
        torch, verl = _uses(entry)
        ours = f"`{entry.ours}`" if entry.ours else ""
        rows.append([f"`{key}`", torch, verl, ours, entry.why])
    imports = [["key", "our key", "note"]]
    for key, target in IMPORTS.items():
        ours = ", ".join(f"`{name}`" for name in (target.ours, target.also) if name)
        imports.append([f"`{key}`", ours, target.why])
    parts = [_VERL_INTRO, _markdown(rows), _VERL_IMPORT, _markdown(imports)]
    return "\n".join(parts)


def _uses(entry: VerlKey) -> tuple[str, str]:
    """What the torch and the verl backend do with a key."""
    allowed = ", ".join(f"`{_yaml(value)}`" for value in entry.allowed)
    if entry.use is Use.OWN:
        return "our key", "our key"
    if entry.use is Use.BOTH:
        return "applied", "applied"
    if entry.use is Use.VERL:
        return f"only {allowed}", "applied"
    if entry.use is Use.ALWAYS:
        return "always so", "applied"
    if entry.use is Use.SAME:
        return "only the value of our key", "only the value of our key"
    if entry.use is Use.PROGRAM:
        return f"only {allowed}", f"only {allowed}"
    return "refused: use our key", "refused: use our key"


def _yaml(value: Any) -> str:
    return json.dumps(value)


def pages() -> dict[str, str]:
    """Path below the repository -> text, of all that is made from the models."""
    return {
        "docs/configuration.md": configuration_page(),
        "docs/verl_keys.md": verl_page(),
        "trinity.schema.json": json.dumps(json_schema(), indent=2) + "\n",
    }


def main(folder: str = ".") -> None:
    """Write all pages below ``folder``."""
    for name, text in pages().items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
