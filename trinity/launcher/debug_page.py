"""The page that `trinity debug` writes: one file, nothing loaded from elsewhere."""

import json
from collections.abc import Sequence
from html import escape

from trinity.common.experience import Experience
from trinity.common.workflows import Task
from trinity.explorer.units import UnitResult
from trinity.launcher.turns import Decode, turns_of
from trinity.utils.words import counted

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1d1d1f; background: #fff; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 1rem; padding: .6rem .8rem;
      border-radius: 6px; background: #f2f2f4; font: 13px/1.5 ui-monospace, monospace; }
pre.model { background: #e5f4e8; } pre.error { background: #fbe6e6; }
h2 { border-top: 1px solid #ccc; padding-top: 1rem; } small { color: #666; }
td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top; }
@media (prefers-color-scheme: dark) {
  body { background: #161618; color: #e8e8ea; } pre { background: #232327; }
  pre.model { background: #1d3323; } pre.error { background: #40201f; } }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(
    task: Task, result: UnitResult, experiences: Sequence[Experience], decode: Decode
) -> str:
    """The page. Everything a model or a data set wrote is escaped."""
    row = json.dumps(task.raw_task, ensure_ascii=False, indent=1, default=str)
    parts = [
        f"<h1>Task {escape(str(task.task_id))}</h1>",
        f"<p>{escape(str(task.workflow))}, {counted(len(result.runs), 'run')}, "
        f"{result.seconds:.2f} s</p>",
        f"<details><summary>row</summary><pre>{escape(row)}</pre></details>",
    ]
    for run in result.runs:
        texts = [*([run.error] if run.error else []), *run.dropped]
        parts += [f"<h2>Run {run.run}</h2><pre class=error>{escape(t)}</pre>" for t in texts]
    parts += [_section(experience, decode) for experience in experiences]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>trinity debug</title><style>{_STYLE}</style>\n" + "\n".join(parts) + "\n"
    )


def _section(experience: Experience, decode: Decode) -> str:
    reward = "none" if experience.reward is None else f"{experience.reward:.4g}"
    head = f"Run {experience.eid.run}, step {experience.eid.step}: reward {reward}"
    numbers = "".join(
        f"<tr><th>{escape(name)}<td>{value:.4g}" for name, value in experience.metrics.items()
    )
    turns = "".join(
        f"<small>{turn.who}, {counted(turn.num_tokens, 'token')}</small>"
        f'<pre class="{turn.who}">{escape(turn.text)}</pre>'
        for turn in turns_of(experience, decode)
    )
    return f"<h2>{escape(head)}</h2><table>{numbers}</table>{turns}"
