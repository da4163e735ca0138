"""Writes `docs/algorithms.md` from the registries: `python -m trinity.algorithm.document`.

What the page says of a method is the first paragraph of its docstring, its defaults are those of
its `__init__`.
"""

import inspect
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trinity.algorithm import (
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
)
from trinity.algorithm.algorithm_type import AlgorithmType
from trinity.algorithm.base import Method
from trinity.algorithm.rollout_correction import RolloutCorrection
from trinity.utils.registry import Registry

_INTRO = """# Algorithms

<!-- Written by `python -m trinity.algorithm.document`; edit the docstrings it is made of. -->

`algorithm.algorithm_type` picks a row of the first two tables; every method of the row can be
replaced by another of the tables below, by name, with its arguments in `<method>_args`. What you
leave out keeps its default. To add your own, see [write_an_algorithm.md](write_an_algorithm.md).

In the formulas `r` is the reward, `mean` and `std` are those of the group (the samples of one
task), `A` is the advantage, `p` the ratio of a token's new to its old probability, `lp` its
log-probability, and `sg` stops the gradient.
"""

_AGGREGATION = """
Losses per token become one number by `loss_agg_mode`. Tokens and rows are counted over the whole
optimizer step, so neither micro-batches nor GPUs nor masked rows change the result:

| `loss_agg_mode` | loss |
|---|---|
| `token-mean` | sum over tokens / tokens |
| `seq-mean-token-sum` | sum over tokens / rows |
| `seq-mean-token-mean` | mean over rows of the mean over their tokens |
| `seq-mean-token-sum-norm` | sum over tokens / length of the longest row |
"""


_COLUMNS = (
    "advantage_fn",
    "policy_loss_fn",
    "kl_loss_fn",
    "entropy_loss_fn",
    "sample_strategy",
    "loss_agg_mode",
    "repeat_times",
)


def page() -> str:
    """The whole of `docs/algorithms.md`."""
    algorithms = [ALGORITHM_TYPE.get(name) for name in ALGORITHM_TYPE.shipped()]
    algorithms.sort(key=lambda algorithm: (algorithm.family, algorithm.name()))
    sections = [
        _INTRO,
        "## Which algorithm\n",
        _table(
            ("`algorithm_type`", "family", "formula", "when to use it", "paper"),
            (_choice(algorithm) for algorithm in algorithms),
        ),
        "\n## What each is made of\n\n`repeat_times` is the default and, in brackets, the least."
        " C: trains a critic. R: compares with a reference model, unless both KL functions are"
        " `none`. T: advantages are computed in the trainer.\n",
        _table(
            ("`algorithm_type`", *(f"`{column}`" for column in _COLUMNS), ""),
            (_parts(algorithm) for algorithm in algorithms),
        ),
        "\n`kl_penalty_fn` is `none` for all of them.\n",
        _AGGREGATION,
        _methods("Advantage functions", "advantage_fn", ADVANTAGE_FN),
        _methods("Policy losses", "policy_loss_fn", POLICY_LOSS_FN),
        _methods("KL functions", "kl_loss_fn` and `kl_penalty_fn", KL_FN),
        _methods("Entropy bonuses", "entropy_loss_fn", ENTROPY_LOSS_FN),
        _methods("Sample strategies", "sample_strategy", SAMPLE_STRATEGY),
        "\n## Rollout correction\n\n`algorithm.rollout_correction`, with"
        " `bypass_old_logprobs: false`.\n",
        _method_body(RolloutCorrection),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _choice(algorithm: type[AlgorithmType]) -> list[str]:
    paper = algorithm.paper
    if paper.startswith("arXiv:"):
        paper = f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
    name = f"`{algorithm.name()}`"
    return [name, algorithm.family, f"`{algorithm.formula}`", algorithm.when, paper]


def _parts(algorithm: type[AlgorithmType]) -> list[str]:
    spec = algorithm.spec()
    flags = {
        "C": spec.use_critic,
        "R": spec.use_reference,
        "T": spec.compute_advantage_in_trainer,
    }
    names = [algorithm.name(), *(getattr(spec, column) for column in _COLUMNS[:-1])]
    return [
        *(f"`{name}`" if name else "" for name in names),
        f"{spec.repeat_times} ({spec.min_repeat_times})",
        " ".join(flag for flag, is_set in flags.items() if is_set),
    ]


def _methods(title: str, key: str, registry: Registry[Any]) -> str:
    names = registry.shipped()
    entries = [f"### `{name}`\n\n{_method_body(registry.get(name))}" for name in names]
    return "\n".join([f"\n## {title}\n\n`algorithm.{key}` is one of these.\n", *entries])


def _method_body(entry: object) -> str:
    assert isinstance(entry, type) and issubclass(entry, Method)
    text, arguments = _split_docstring(inspect.getdoc(entry) or "")
    for base in entry.__mro__[1:-1]:
        arguments = _split_docstring(inspect.getdoc(base) or "")[1] | arguments
    parts = [text + "\n"]
    defaults = entry.default_args()
    if defaults:
        rows = [(f"`{k}`", f"`{v!r}`", arguments.get(k, "")) for k, v in defaults.items()]
        parts.append(_table(("argument", "default", "meaning"), rows) + "\n")
    return "\n".join(parts)


def _split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before `Args:`, and what it says of each argument."""
    text, _, rest = docstring.partition("\nArgs:\n")
    block = re.split(r"\n\n(?=\S)", rest)[0]
    arguments: dict[str, str] = {}
    for names, meaning in re.findall(
        r"^    ([\w, \n]+?):((?:.*)(?:\n {8}.*)*)", block, flags=re.MULTILINE
    ):
        for name in re.findall(r"\w+", names):
            arguments[name] = " ".join(meaning.split())
    return text.replace("``", "`").strip(), arguments


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/algorithms.md")
    target.write_text(page())
