"""Speed of the buffer: queue, SQLite, serialising, and opening a large taskset.

`python benchmarks/buffer.py` prints each number as it comes, and all as one JSON line last. With
`--postgres URL` the SQL storage is measured there too.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from trinity.buffer import get_buffer_reader, get_buffer_writer, make_storage
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.experience import EID, Experience, deserialize_many, serialize_many

_NUM_TOKENS = 512
_BATCH = 64
_OPEN_TASKSET = """
import sys, time
def peak_mb():  # not by getrusage, which also counts the process that started this one
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
from trinity.buffer.taskset import open_taskset
from trinity.common.config.buffer import TasksetConfig
before = peak_mb()
start = time.perf_counter()
taskset = open_taskset(TasksetConfig(
    path=sys.argv[1], format={"prompt_key": "question", "response_key": "answer"},
    data_selector={"selector_type": "shuffle"}))
tasks = taskset.next_tasks(128)
seconds = time.perf_counter() - start
print(len(taskset), seconds, before, peak_mb())
"""


def experiences(count: int) -> list[Experience]:
    length = _NUM_TOKENS // 2
    return [
        Experience(
            eid=EID(0, index, 0),
            tokens=torch.randint(0, 50_000, (_NUM_TOKENS,)),
            prompt_length=_NUM_TOKENS - length,
            logprobs=torch.randn(length),
            advantages=torch.randn(length),
            returns=torch.randn(length),
            token_versions=torch.ones(length),
            reward=1.0,
            info={"model_version": 1, "task_index": {"index": index, "taskset_id": 0}},
            metrics={"accuracy": 1.0},
            prompt_text="Some words of a question. " * 30,
            response_text="Some words of an answer. " * 30,
        )
        for index in range(count)
    ]


async def end_to_end(config: ExperienceBufferConfig, count: int) -> float:
    """Experiences a second from a writer to a reader that run side by side."""
    batches = [experiences(_BATCH) for _ in range(count // _BATCH)]
    storage = make_storage(config)
    await storage.prepare()
    writer = get_buffer_writer(config, storage)
    reader = get_buffer_reader(config, storage, batch_size=_BATCH)
    await writer.acquire()
    start = time.perf_counter()

    async def write() -> None:
        for batch in batches:
            await writer.write(batch)
        await writer.release()

    async def read() -> int:
        found = 0
        while True:
            try:
                found += len(await reader.read())
            except StopAsyncIteration:
                return found

    _, found = await asyncio.gather(write(), read())
    seconds = time.perf_counter() - start
    await storage.close()
    assert found == len(batches) * _BATCH
    return found / seconds


async def written_and_read_back(config: ExperienceBufferConfig, count: int) -> tuple[float, float]:
    """Experiences written a second, then read back a second."""
    batches = [experiences(_BATCH) for _ in range(count // _BATCH)]
    storage = make_storage(config)
    await storage.prepare()
    start = time.perf_counter()
    for batch in batches:
        await storage.put(batch)
    written = time.perf_counter()
    found = 0
    while found < len(batches) * _BATCH:
        found += len(await storage.get(_BATCH, 10) or [])
    seconds = time.perf_counter() - written
    await storage.close()
    return found / (written - start), found / seconds


def serialising() -> dict[str, float]:
    """Microseconds an experience, in batches and alone."""
    rows = experiences(1024)
    batches = [rows[i : i + _BATCH] for i in range(0, len(rows), _BATCH)]
    start = time.perf_counter()
    payloads = [serialize_many(batch) for batch in batches]
    middle = time.perf_counter()
    for payload in payloads:
        deserialize_many(payload)
    end = time.perf_counter()
    for row in rows:
        row.serialize()
    alone = time.perf_counter()
    return {
        "serialize_us": (middle - start) / len(rows) * 1e6,
        "deserialize_us": (end - middle) / len(rows) * 1e6,
        "serialize_alone_us": (alone - end) / len(rows) * 1e6,
    }


def large_taskset(folder: Path, num_rows: int) -> dict[str, float]:
    """Seconds and memory of opening a taskset and taking a shuffled batch, in a fresh process."""
    path = folder / "train.jsonl"
    line = {"question": "How many words does this question have? " * 4, "answer": "7" * 20}
    with path.open("w") as stream:
        for index in range(num_rows):
            stream.write(json.dumps({**line, "index": index}) + "\n")
    command = [sys.executable, "-c", _OPEN_TASKSET, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    count, seconds, before, peak = map(float, output.split())
    assert count == num_rows
    return {
        "open_seconds": seconds,
        "open_peak_mb": peak,
        "open_added_mb": peak - before,
        "open_file_mb": path.stat().st_size / 2**20,
    }


def section(folder: Path, kind: str, path: str | None) -> ExperienceBufferConfig:
    address = None if path is None else path if "://" in path else str(folder / path)
    return ExperienceBufferConfig(name=f"bench_{time.time_ns()}", storage_type=kind, path=address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6400, help="experiences of each measurement")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large taskset")
    parser.add_argument("--postgres", help="address of a PostgreSQL database")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}

    def note(values: dict[str, float]) -> None:
        result.update({name: round(value, 2) for name, value in values.items()})
        for name, value in values.items():
            print(f"{name:32} {value:12.1f}")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, path in (("memory", None), ("jsonl", "q.jsonl"), ("sqlite", "q.db")):
            config = section(folder, "queue", path)
            speed = asyncio.run(end_to_end(config, arguments.count))
            note({f"queue_{label}_per_s": speed})
        databases = {"sqlite": "s.db"}
        if arguments.postgres:
            databases["postgresql"] = arguments.postgres
        for label, path in databases.items():
            config = section(folder, "sql", path)
            wrote, read = asyncio.run(written_and_read_back(config, arguments.count))
            note({f"{label}_written_per_s": wrote, f"{label}_read_per_s": read})
        note(serialising())
        note(large_taskset(folder, arguments.rows))
    print(json.dumps({"benchmark": "buffer", "tokens": _NUM_TOKENS, **result}))


if __name__ == "__main__":
    main()
