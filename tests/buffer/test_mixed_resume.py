"""A training step reads over two buffers, and goes on over both after a stop or a kill."""

from pathlib import Path
from typing import Any

import pytest

from tests.buffer.samples import experience
from tests.buffer.tokenizers_for_tests import characters
from trinity.algorithm import SAMPLE_STRATEGY, SampleStrategy
from trinity.algorithm.sample_strategy.base import oldest_version
from trinity.buffer.reader.dataset import DatasetReader
from trinity.buffer.reader.queue import QueueReader
from trinity.buffer.rows import ListRows
from trinity.buffer.schema import FORMATTER
from trinity.buffer.selector import SELECTORS, DataSource
from trinity.buffer.storage.journal import JsonlJournal
from trinity.buffer.storage.queue import QueueStorage
from trinity.buffer.storage.sql_ledger import SQLJournal
from trinity.common.config.buffer import DataSelectorConfig, FormatConfig

NUM_STEPS, NUM_ROWS = 6, 12
ROWS = ListRows([{"q": f"q{i}", "a": f"a{i}"} for i in range(NUM_ROWS)])
FORMATTED = FORMATTER.get("sft")(
    FormatConfig(prompt_type="plaintext", prompt_key="q", response_key="a"), characters()
)


async def opened(folder: Path, kind: str) -> QueueStorage:
    jsonl, table = str(folder / "q.jsonl"), str(folder / "q.db")
    journal = JsonlJournal(jsonl) if kind == "jsonl" else SQLJournal(table, "q")
    storage = QueueStorage("q", journal=journal)
    await storage.prepare()
    return storage


def mixed(storage: QueueStorage) -> SampleStrategy:
    selector = SELECTORS.get("shuffle")(
        DataSource(ROWS), DataSelectorConfig(selector_type="shuffle")
    )
    expert = DatasetReader(ROWS, FORMATTED, selector, name="sft", total=NUM_ROWS)
    usual = QueueReader(storage, timeout_s=0.1)
    return SAMPLE_STRATEGY.get("mix")(usual, 4, {"sft_dataset": expert}, expert_data_ratio=0.5)


async def trained(strategy: SampleStrategy, steps: range) -> list[list[str]]:
    found = []
    for step in steps:
        exps, _, _ = await strategy.sample(step)
        found.append([f"{e.eid.batch}/{e.eid.task}" for e in exps])
    return found


async def filled(folder: Path, kind: str) -> QueueStorage:
    storage = await opened(folder, kind)
    for number in range(NUM_STEPS):
        await storage.put([experience(2 * number), experience(2 * number + 1)])
    return storage


@pytest.mark.parametrize("kind", ["jsonl", "sqlite"])
@pytest.mark.parametrize("stop", [1, 3, 5])
async def test_both_buffers_go_on_in_the_order_of_the_unbroken_run(
    kind: str, stop: int, tmp_path: Path
):
    folders = [tmp_path / name for name in ("unbroken", "broken")]
    for folder in folders:
        folder.mkdir()
    whole = await filled(folders[0], kind)
    unbroken = await trained(mixed(whole), range(1, NUM_STEPS + 1))
    await whole.close()
    first = await filled(folders[1], kind)
    strategy = mixed(first)
    done = await trained(strategy, range(1, stop + 1))
    saved: dict[str, Any] = {"storage": first.state_dict(), "strategy": strategy.state_dict()}
    await strategy.sample(stop + 1)  # trained on and lost: the process is killed
    await first.close()
    again = await opened(folders[1], kind)
    again.load_state_dict(saved["storage"])
    strategy = mixed(again)
    strategy.load_state_dict(saved["strategy"])
    rest = await trained(strategy, range(stop + 1, NUM_STEPS + 1))
    await again.close()
    assert done + rest == unbroken
    ids = [row for step in done + rest for row in step]
    assert len(ids) == len(set(ids)) == 4 * NUM_STEPS


async def test_the_bound_of_staleness_holds_after_a_resume(tmp_path: Path):
    first = await opened(tmp_path, "jsonl")
    for version in range(6):
        await first.put([experience(version, version=version)])
    state = first.state_dict()
    await first.close()
    again = await opened(tmp_path, "jsonl")
    again.load_state_dict(state)
    reader = QueueReader(again, timeout_s=0.1)
    strategy = SAMPLE_STRATEGY.get("staleness_control")(reader, 2, max_staleness=2)
    exps, _, _ = await strategy.sample(6)  # by version 5 of the weights
    assert [oldest_version(e) for e in exps] == [3, 4]
    assert (await again.metrics())["dropped"] == 3
    await again.close()
