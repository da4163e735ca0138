import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from trinity.buffer.pipelines.task import STATS, TaskPipeline, TaskPipelineSettings, tenths
from trinity.buffer.rows import DataError, Row


class Odd:
    """Keeps odd numbers, and rates a row by its number. Stops after some chunks."""

    def __init__(self, *, needs_all_rows: bool = False, stop_after: int | None = None) -> None:
        self.needs_all_rows = needs_all_rows
        self.stop_after = stop_after
        self.chunks: list[int] = []

    def fingerprint(self) -> str:
        return "odd"

    async def prepare(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    async def process_rows(self, rows: Sequence[Row]) -> tuple[list[Row], dict[str, float]]:
        if self.stop_after is not None and len(self.chunks) == self.stop_after:
            raise ConnectionError("stopped")
        self.chunks.append(len(rows))
        kept = [
            {**row, STATS: {"llm_quality_score": row["n"], "length": 1}}
            for row in rows
            if int(row["n"]) % 2
        ]
        return kept, {"dropped": float(len(rows) - len(kept))}


def pipeline(tmp_path: Path, processor: Odd, **settings) -> TaskPipeline:
    source = tmp_path / "raw.jsonl"
    if not source.exists():
        source.write_text("".join(f'{{"n": {i}, "q": "q{i}"}}\n' for i in range(10)))
    options = {"inputs": [str(source)], "output": tmp_path / "clean", **settings}
    return TaskPipeline(processor, TaskPipelineSettings(**options), chunk_rows=4)


def result(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_chunks_in_order_with_progress(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    processor = Odd()
    work = pipeline(tmp_path, processor)
    path = await work.run(lambda done, total: seen.append((done, total)))
    assert [row["n"] for row in result(path)] == [1, 3, 5, 7, 9]
    assert result(path)[0] == {"n": 1, "q": "q1", "llm_quality_score": 1, "length": 1}
    assert seen == [(0, 10), (4, 10), (8, 10), (10, 10)]
    assert processor.chunks == [4, 4, 2]
    assert work.metrics == {"dropped": 5.0, "rows_kept": 5.0}


def test_progress_is_told_by_tenths():
    lines: list[str] = []
    report = tenths(lines.append)
    for done in range(0, 101, 4):
        report(done, 100)
    assert len(lines) == 11
    assert (lines[0], lines[-1]) == (
        "Task pipeline: 0 of 100 rows.",
        "Task pipeline: 100 of 100 rows.",
    )


async def test_a_stopped_pipeline_goes_on(tmp_path: Path):
    processor = Odd(stop_after=2)
    with pytest.raises(ConnectionError):
        await pipeline(tmp_path, processor).run()
    assert not processor.is_open
    processor = Odd()
    path = await pipeline(tmp_path, processor).run()
    assert processor.chunks == [2]
    assert [row["n"] for row in result(path)] == [1, 3, 5, 7, 9]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clean", "raw.jsonl"]


async def test_a_finished_pipeline_is_not_run_again_and_another_is_refused(tmp_path: Path):
    await pipeline(tmp_path, Odd()).run()
    processor = Odd()
    await pipeline(tmp_path, processor).run()
    assert processor.chunks == []
    with pytest.raises(DataError, match="exists already"):
        await pipeline(tmp_path, Odd(), top_k=2).run()


async def test_steps_that_compare_rows_get_all_of_them(tmp_path: Path):
    processor = Odd(needs_all_rows=True)
    await pipeline(tmp_path, processor).run()
    assert processor.chunks == [10]


async def test_the_best_rows_by_priority(tmp_path: Path):
    path = await pipeline(tmp_path, Odd(), top_k=2, priority_weights={"quality": 2.0}).run()
    assert [(row["n"], row["priority"]) for row in result(path)] == [(9, 18.0), (7, 14.0)]
    with pytest.raises(DataError, match="'novelty' to sort by; the rows have: length, llm_quality"):
        await pipeline(
            tmp_path, Odd(), output=tmp_path / "x", priority_weights={"novelty": 1.0}
        ).run()


async def test_target_fields_stay_with_the_statistics(tmp_path: Path):
    path = await pipeline(tmp_path, Odd(), target_fields=["q"]).run()
    assert set(result(path)[0]) == {"q", "llm_quality_score", "length"}
    with pytest.raises(DataError, match="'answer', but a row has only n, q"):
        await pipeline(tmp_path, Odd(), output=tmp_path / "x", target_fields=["answer"]).run()
