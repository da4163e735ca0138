"""What a person sees of a run: the plan, a live line of each stage, and the table at the end."""

import math
import time
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trinity.launcher.summary import RunSummary, StageSummary, main_score, step_seconds
from trinity.utils.metrics import Metrics

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 48
_PLAIN_EVERY_S = 5.0
_COLUMNS = ("stage", "steps", "eval", "reward", "samples/s", "time")


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """``values`` as a line of bars between their lowest and highest, at most ``width`` long.

    Where a value is not finite, there is a gap.
    """
    if not values:
        return ""
    per = max(1, -(-len(values) // width))
    means = [sum(block) / len(block) for block in _blocks(values, per)]
    finite = [mean for mean in means if math.isfinite(mean)] or [0.0]
    low, high = min(finite), max(finite)
    half_span = high / 2 - low / 2  # the whole one may be more than a float holds
    return "".join(
        _BARS[1 + round((mean / 2 - low / 2) / (half_span or 1.0) * (len(_BARS) - 2))]
        if math.isfinite(mean)
        else _BARS[0]
        for mean in means
    )


def _blocks(values: list[float], size: int) -> list[list[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


class Screen:
    """Shows a run on ``console``; a live display on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._live: Live | None = None
        self._stage: StageSummary | None = None
        self._total: int | None = None
        self._seconds: deque[float] = deque(maxlen=10)
        self._under_way: str | None = None
        self._has_news = False
        self._last_line = ""
        self._is_first_step = self._is_starting = True
        self._started = self._printed_at = time.monotonic()

    def say(self, text: str, style: str = "") -> None:
        """A line of its own, above what is live. ``text`` is shown as it is, without markup."""
        self.console.print(Text(text, style=style))

    def show(self, renderable: RenderableType) -> None:
        """Anything rich can draw."""
        self.console.print(renderable)

    def start_stage(self, title: str, stage: StageSummary, total_steps: int | None) -> None:
        """Begin the live line of a stage."""
        self.end_stage()
        self._stage, self._total = stage, total_steps
        self._started = time.monotonic()
        self._seconds.clear()
        self._under_way = None
        self._is_first_step = self._is_starting = True
        self.console.rule(Text(title))
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=2)
            self._live.start(refresh=True)

    def end_stage(self) -> None:
        """Leave the last state of the stage on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._has_news:
            self._say_line()
        self._has_news, self._last_line = False, ""

    def report(self, role: str, step: int, metrics: Metrics) -> None:
        """Show one report of a part."""
        self._is_starting = False
        if role in ("eval", "bench"):
            self._say_eval(role, step, metrics)
            return
        seconds = step_seconds(role, self._stage.mode if self._stage else "", metrics)
        if seconds is not None:
            if self._is_first_step and self._seconds:  # it waited for all to start
                self._seconds.clear()
                self._is_first_step = False
            self._seconds.append(seconds)
        self._has_news = True
        if self._live is None and time.monotonic() - self._printed_at >= _PLAIN_EVERY_S:
            self._printed_at, self._has_news = time.monotonic(), False
            self._say_line()

    def progress(self, text: str, is_to_stay: bool) -> None:
        """Show what is under way; without a terminal only lines that are to stay."""
        self._under_way = text
        if self._live is None and is_to_stay:
            self.say(text)

    def _say_eval(self, role: str, step: int, metrics: Metrics) -> None:
        found = main_score(metrics)
        if found is not None:
            name, value = found
            is_start = role == "bench" and not step  # no checkpoint: what the stage begins with
            where = "of the model itself" if is_start else f"at step {step}"
            self.say(f"{role} {where}: {name.removeprefix(role + '/')} = {value:.3f}", "cyan")

    def _say_line(self) -> None:
        """The state of the stage, unless that is what was said last."""
        line = self._line()
        if line != self._last_line:
            self.say(line)
        self._last_line = line

    def _line(self) -> str:
        """The state of the stage in one plain line."""
        stage = self._stage
        assert stage is not None
        parts = [self._step_text(stage.steps)]
        if stage.rewards:
            parts.append(f"reward {stage.rewards[-1]:.3f}")
        elif stage.losses:
            parts.append(f"loss {stage.losses[-1]:.4f}")
        if self._seconds:
            parts.append(f"{sum(self._seconds) / len(self._seconds):.2f} s/step")
        if stage.tokens_per_second:
            parts.append(f"{stage.tokens_per_second:,.0f} tokens/s")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"{left:.0f} s left")
        return "   ".join(parts)

    def _step_text(self, steps: int) -> str:
        """A run that gives more than one experience makes more training steps than planned."""
        if not self._total:
            return f"step {steps}"
        if steps > self._total:
            return f"step {steps} (of {self._total} planned)"
        return f"step {steps}/{self._total}"

    def _seconds_left(self) -> float | None:
        if self._stage is None or not self._total or not self._seconds:
            return None
        left = self._total - self._stage.steps
        if left < 0:
            return None
        return left * sum(self._seconds) / len(self._seconds)

    def _draw(self) -> RenderableType:
        stage = self._stage
        assert stage is not None
        values, name = (stage.rewards, "reward") if stage.rewards else (stage.losses, "loss")
        is_starting = self._is_starting and self._under_way is None
        rows: list[RenderableType] = [Text(self._waiting() if is_starting else self._line())]
        if self._under_way is not None:  # also an empty one: what stands below is not to jump
            rows.append(Text(self._under_way, style="cyan"))
        if self._total:
            bar = Table.grid()  # a bar by itself does not end its line
            bar.add_row(ProgressBar(total=self._total, completed=stage.steps, width=_WIDTH + 8))
            rows.append(bar)
        if values:
            chart = Text(f"{name:<7} ")
            chart.append(sparkline(values), style="green")
            chart.append(f"  {values[0]:.3f} → {values[-1]:.3f}")
            rows.append(chart)
        return Group(*rows)

    def _waiting(self) -> str:
        return f"starting: models, engines and runners ({time.monotonic() - self._started:.0f} s)"

    def final_table(self, summary: RunSummary, hints: list[tuple[str, str]]) -> None:
        """The table at the end: stages with scores (first and last) and times; where things are."""
        self.end_stage()
        title = Text(f"{summary.project}/{summary.name}: {summary.status}")
        table = Table(title=title, title_style="bold")
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "stage" else "right")
        for stage in summary.stages:
            table.add_row(*map(Text, _stage_row(stage)))
        self.console.print(table)
        starting = f", {summary.seconds_starting:.0f} s of it before the first step"
        lines = [
            *hints,
            ("time", _minutes(summary.seconds) + (starting if summary.seconds_starting else "")),
            ("memory", f"{summary.peak_memory_mb:,.0f} MB at the peak"),
        ]
        for label, text in lines:  # whole, however narrow the screen: paths get copied
            line = Text.assemble((f"{label:<8}", "bold"), text)
            self.console.print(line, soft_wrap=True)


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _stage_row(stage: StageSummary) -> list[str]:
    name = f"{stage.name} ({stage.algorithm or stage.mode})"
    if stage.is_skipped:
        return [name, str(stage.steps), *[""] * (len(_COLUMNS) - 3), "done before"]
    is_one = stage.eval_before is stage.eval_after  # there was a single evaluation
    before = None if is_one else main_score(stage.eval_before)
    after = main_score(stage.eval_after)
    return [
        name,
        str(stage.steps),
        _change(before and before[1], after and after[1]),
        _change(stage.reward_first, stage.reward_last_5),
        _rate(stage.samples_per_second),
        f"{stage.seconds:.0f} s",
    ]


def _rate(value: float) -> str:
    """A rate with a digit that says something; none where nothing was sampled or trained on."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}" if value else ""


def _change(first: float | None, last: float | None) -> str:
    """``first`` and ``last`` with an arrow between; one alone if the other is not known."""
    return " → ".join(f"{value:.3f}" for value in (first, last) if value is not None)
