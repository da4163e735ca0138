"""Cleaning and scoring raw data once, before a run, in chunks, so that it goes on after a stop.

Who cleans and scores (Data-Juicer) is given as a `RowProcessor`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trinity.buffer.rows import DataError, Row, Rows, open_rows
from trinity.common.config.data_processor import TaskPipelineConfig
from trinity.common.config.service import DataJuicerServiceConfig
from trinity.utils.metrics import Metrics
from trinity.utils.registry import Registry

STATS = "stats"
"""Column in which a processor returns what it found out about a row."""

DEFAULT_WEIGHTS = {"difficulty": -0.7, "diversity": 0.8, "usage_frequency": -0.5, "quality": 1.0}
_CHUNK_ROWS = 500
_OUTPUT_NAME = "output.jsonl"
_MARK_NAME = ".pipeline"

Progress = Callable[[int, int], None]


class RowProcessor(Protocol):
    """What works on rows. ``prepare`` -> ``process_rows`` -> ``close``."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether a step compares rows with each other, so that they must come in one piece."""
        ...

    def fingerprint(self) -> str:
        """The same text for the same steps."""
        ...

    async def prepare(self) -> None: ...

    async def close(self) -> None: ...

    async def process_rows(self, rows: Sequence[Row]) -> tuple[list[Row], Metrics]:
        """The rows that are left, perhaps changed, with a column `STATS` (an object) each."""
        ...


ROW_PROCESSORS: Registry[Callable[..., RowProcessor]] = Registry(
    "row processor",
    {"data_juicer": "trinity.service.data_juicer.processor.DataJuicerProcessor"},
)


@dataclass(frozen=True)
class TaskPipelineSettings:
    """What goes in and comes out.

    Args:
        inputs: Files, folders or hub names.
        output: Folder of the result; must not exist yet, or be of the same pipeline.
        target_fields: Columns of the result, besides the statistics; empty keeps all.
        priority_weights: Score -> weight of the priority that the result is sorted by; empty
            keeps the order, unless ``top_k`` asks for the best.
        top_k: Rows that are kept, by priority; -1 keeps all.
    """

    inputs: Sequence[str]
    output: Path
    target_fields: Sequence[str] = ()
    priority_weights: Mapping[str, float] = field(default_factory=dict)
    top_k: int = -1
    split: str = "train"
    subset_name: str | None = None


class TaskPipeline:
    """Runs a processor over data sets. A second run of the same pipeline does nothing."""

    def __init__(
        self,
        processor: RowProcessor,
        settings: TaskPipelineSettings,
        *,
        chunk_rows: int = _CHUNK_ROWS,
    ) -> None:
        self.processor = processor
        self.settings = settings
        self.chunk_rows = chunk_rows
        self.metrics: Metrics = {}

    async def run(self, report: Progress = lambda done, total: None) -> Path:
        """The file of the result.

        Chunks that an earlier, stopped run of the same pipeline has finished are taken over.

        Args:
            report: Called with the rows done and all rows, at the start and after each chunk.

        Raises:
            DataError: The input can't be read, nothing is left of it, or the output folder is
                taken by something else.
        """
        output = self.settings.output / _OUTPUT_NAME
        inputs = [
            open_rows(path, split=self.settings.split, subset=self.settings.subset_name)
            for path in self.settings.inputs
        ]
        total = sum(map(len, inputs))
        mark = self._mark(total)
        if self._is_done(mark):
            report(total, total)
            return output
        parts = self._parts_folder(mark)
        try:
            await self.processor.prepare()
            await self._process_all(inputs, parts, report)
        finally:
            await self.processor.close()
        self._finish(parts, output, mark)
        return output

    async def _process_all(self, inputs: Sequence[Rows], parts: Path, report: Progress) -> None:
        done, total = 0, sum(map(len, inputs))
        report(done, total)
        for number, rows in enumerate(self._chunks(inputs)):
            part = parts / f"{number:06d}.jsonl"
            if not part.exists():
                await self._process(rows, part)
            done += len(rows)
            report(done, total)

    def _chunks(self, inputs: Sequence[Rows]) -> Iterator[list[Row]]:
        chunk: list[Row] = []
        for rows in inputs:
            for index in range(len(rows)):
                chunk.append(rows[index])
                if len(chunk) == self.chunk_rows and not self.processor.needs_all_rows:
                    yield chunk
                    chunk = []
        if chunk:
            yield chunk

    async def _process(self, rows: list[Row], part: Path) -> None:
        kept, metrics = await self.processor.process_rows(rows)
        for name, value in metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        _write_whole(part, kept)

    def _finish(self, parts: Path, output: Path, mark: str) -> None:
        rows = [row for part in sorted(parts.glob("*.jsonl")) for row in _read(part)]
        if not rows:
            raise DataError("The task pipeline left no row; its operators filter too much.")
        chosen = self._ordered(rows)
        _write_whole(output, [self._shaped(row) for row in chosen])
        self.metrics |= {"rows_kept": float(len(chosen))}
        (output.parent / _MARK_NAME).write_text(mark)
        shutil.rmtree(parts)

    def _ordered(self, rows: list[Row]) -> list[Row]:
        settings = self.settings
        if not settings.priority_weights and settings.top_k < 0:
            return rows
        weights = settings.priority_weights or DEFAULT_WEIGHTS
        known = {name for row in rows for name in _stats(row)}
        used = {name: key for name in weights if (key := _stat_key(name, known)) is not None}
        unknown = [name for name in settings.priority_weights if name not in used]
        if unknown or not used:
            raise DataError(
                f"No operator gives the score {(unknown or list(weights))[0]!r} to sort by; the "
                f"rows have: {', '.join(sorted(known)) or 'none'}.",
                key="priority_weights",
            )

        def rated(row: Row) -> tuple[float, Row]:
            found = _stats(row)
            value = sum(weights[name] * _number(found.get(key)) for name, key in used.items())
            return value, {**row, STATS: {**found, "priority": value}}

        best = sorted(map(rated, rows), key=lambda pair: -pair[0])
        return [row for _, row in best[: len(best) if settings.top_k < 0 else settings.top_k]]

    def _shaped(self, row: Row) -> Row:
        fields = self.settings.target_fields
        missing = [name for name in fields if name not in row]
        if missing:
            raise DataError(
                f"target_fields has {missing[0]!r}, but a row has only {', '.join(row)}.",
                key="target_fields",
            )
        kept = {k: v for k, v in row.items() if k != STATS and (not fields or k in fields)}
        return {**kept, **_stats(row)}

    def _mark(self, total: int) -> str:
        """What tells this pipeline from others."""
        settings = {**vars(self.settings), "output": "", "rows": total}
        text = json.dumps(settings, default=list, sort_keys=True) + self.processor.fingerprint()
        return hashlib.sha256(text.encode()).hexdigest()

    def _is_done(self, mark: str) -> bool:
        folder = self.settings.output
        if not folder.exists():
            return False
        there = folder / _MARK_NAME
        if there.is_file() and there.read_text() == mark:
            return True
        raise DataError(
            f"The output {str(folder)!r} of the task pipeline exists already, and another pipeline "
            "made it. Move it away, or name another output.",
            key="output",
        )

    def _parts_folder(self, mark: str) -> Path:
        output = self.settings.output
        parts = output.with_name(f"{output.name}.parts-{mark[:8]}")
        parts.mkdir(parents=True, exist_ok=True)
        return parts


async def run_task_pipeline(
    config: TaskPipelineConfig,
    service: DataJuicerServiceConfig | None,
    output: str,
    report: Progress = lambda done, total: None,
) -> Metrics:
    """Run the task pipeline of a config; does nothing if its result is there already.

    Args:
        service: Section `service.data_juicer`.
        output: Folder of the result; becomes the path of the taskset.
        report: Called with the rows done and all rows.

    Raises:
        DataError: Input or output can't be used.
        TrinityError: The service can't be started, or an operator failed.
    """
    processor = ROW_PROCESSORS.get("data_juicer")(
        config.operators,
        config.config_path,
        service_config=service,
        num_process=config.num_process,
    )
    settings = TaskPipelineSettings(
        inputs=config.inputs,
        output=Path(output),
        target_fields=config.target_fields,
        priority_weights=config.priority_weights,
        top_k=config.top_k,
        split=config.output.split if config.output is not None else "train",
        subset_name=config.output.subset_name if config.output is not None else None,
    )
    pipeline = TaskPipeline(processor, settings)
    await pipeline.run(report)
    return {f"task_pipeline/{name}": value for name, value in pipeline.metrics.items()}


def tenths(say: Callable[[str], None]) -> Progress:
    """A report that says a line for each tenth of the rows."""
    told = -1

    def report(done: int, total: int) -> None:
        nonlocal told
        tenth = 10 * done // max(total, 1)
        if tenth > told:
            say(f"Task pipeline: {done} of {total} rows.")
        told = max(told, tenth)

    return report


def _stats(row: Row) -> dict[str, object]:
    found = row[STATS]
    assert isinstance(found, dict), "a processor gives each row its statistics"
    return found


def _stat_key(name: str, known: set[str]) -> str | None:
    """The statistic a score is found in: itself, or as Data-Juicer's operators name it."""
    names = (name, f"{name}_score", f"llm_{name}_score")
    return next((key for key in names if key in known), None)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _read(path: Path) -> list[Row]:
    with path.open() as stream:
        return [json.loads(line) for line in stream]


def _write_whole(path: Path, rows: Sequence[Row]) -> None:
    """Write aside and rename: the file is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("w") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    os.replace(aside, path)
