import json
from pathlib import Path

import numpy as np
import pytest

from trinity.buffer import TaskScheduler, check_experience_buffer, check_taskset, open_tasksets
from trinity.buffer.rows import BadRowError, DataError
from trinity.buffer.task_scheduler import read_all
from trinity.buffer.taskset import open_taskset
from trinity.common.config.buffer import ExperienceBufferConfig, TasksetConfig
from trinity.common.constants import SELECTOR_METRIC

KEYS = {"prompt_key": "q", "response_key": "a"}


def file(path: Path, count: int, name: str = "train.jsonl") -> str:
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"q": f"q{i}", "a": i, "low": i / count, "high": 1.0} for i in range(count)]
    (path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def section(path: str, **fields: object) -> TasksetConfig:
    return TasksetConfig(**{"path": path, "format": KEYS, **fields})  # type: ignore[arg-type]


def scheduler(*configs: TasksetConfig, batch_size: int = 4, **settings) -> TaskScheduler:
    return TaskScheduler(open_tasksets(configs), batch_size, **settings)


def places(tasks: list) -> list[tuple[int, int]]:
    return [(task.index["taskset_id"], task.index["index"]) for task in tasks]


async def steps(source: TaskScheduler) -> list[list[tuple[int, int]]]:
    found = []
    while True:
        try:
            found.append(places(await source.next_batch()))
        except StopAsyncIteration:
            return found


async def test_one_taskset_in_full_batches(tmp_path: Path):
    source = scheduler(section(file(tmp_path, 5)), total_epochs=2)
    assert await steps(source) == [
        [(0, 0), (0, 1), (0, 2), (0, 3)],
        [(0, 4), (0, 0), (0, 1), (0, 2)],
    ]
    assert source.total_steps == 2


async def test_total_steps_win_over_epochs(tmp_path: Path):
    source = scheduler(section(file(tmp_path, 5)), total_steps=4)
    assert len(await steps(source)) == 4


async def test_several_tasksets_are_mixed_by_size_and_grouped(tmp_path: Path):
    first = section(file(tmp_path / "a", 3), default_workflow_type="x")
    second = section(
        file(tmp_path / "b", 6), default_workflow_type="y", repeat_times=2,
        data_selector={"selector_type": "shuffle", "seed": 1},
    )  # fmt: skip
    found = await steps(scheduler(first, second, total_epochs=2))
    order = []
    for epoch in range(2):
        ids = [0] * 3 + [1] * 6
        np.random.default_rng(epoch).shuffle(ids)
        order += ids
    shuffled = [
        int(i)
        for epoch in range(2)
        for i in np.random.Generator(np.random.PCG64(1 + epoch)).permutation(6)
    ]
    rows = {0: iter([0, 1, 2] * 2), 1: iter(shuffled)}
    for step, tasks in enumerate(found):
        ids = order[4 * step : 4 * step + 4]
        grouped = [i for kind in dict.fromkeys(ids) for i in ids if i == kind]
        assert tasks == [(i, next(rows[i])) for i in grouped]
    assert len(found) == 18 // 4


async def test_each_taskset_keeps_its_own_workflow_and_repeats(tmp_path: Path):
    first = section(file(tmp_path / "a", 2), default_workflow_type="x", repeat_times=1)
    second = section(file(tmp_path / "b", 2), default_workflow_type="y", repeat_times=8)
    tasks = await scheduler(first, second).next_batch()
    assert {(t.workflow, t.repeat_times) for t in tasks} == {("x", 1), ("y", 8)}


@pytest.mark.parametrize("kind", ["sequential", "shuffle", "random"])
async def test_a_resume_goes_on_where_it_stopped(kind: str, tmp_path: Path):
    configs = [
        section(file(tmp_path / name, size), data_selector={"selector_type": kind})
        for name, size in (("a", 3), ("b", 5))
    ]
    unbroken = await steps(scheduler(*configs, total_epochs=3))
    first = scheduler(*configs, total_epochs=3)
    begun = [places(await first.next_batch()) for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    second = scheduler(*configs, total_epochs=3)
    second.load_state_dict(state)
    assert begun + await steps(second) == unbroken


@pytest.mark.parametrize("known_by", ["source", "name"])
async def test_a_resume_knows_tasksets_that_stand_in_another_order(known_by: str, tmp_path: Path):
    """Of three sets alike in size, the first now stands last; their files are moved or are not."""

    def configs(folder: Path) -> list[TasksetConfig]:
        return [
            section(
                file(folder / name, 6),
                data_selector={"selector_type": "shuffle", "seed": seed},
                **({"name": name} if known_by == "name" else {}),
            )
            for seed, name in enumerate(("a", "b", "c"))
        ]

    before = configs(tmp_path / "before")
    unbroken = await steps(scheduler(*before, total_epochs=3))
    first = scheduler(*before, total_epochs=3)
    begun = [places(await first.next_batch()) for _ in range(3)]
    state = json.loads(json.dumps(first.state_dict()))
    after = configs(tmp_path / ("before" if known_by == "source" else "after"))
    second = scheduler(*after[1:], after[0], total_epochs=3)
    second.load_state_dict(state)
    again = [places(await second.next_batch()) for _ in range(2)]
    state = json.loads(json.dumps(second.state_dict()))
    third = scheduler(*before, total_epochs=3)
    third.load_state_dict(state)
    earlier_ids = {0: 1, 1: 2, 2: 0}
    again = [[(earlier_ids[number], row) for number, row in step] for step in again]
    assert begun + again + await steps(third) == unbroken


async def test_a_resume_with_other_data_is_refused(tmp_path: Path):
    state = scheduler(section(file(tmp_path / "a", 3))).state_dict()
    with pytest.raises(DataError, match="has 4 rows, but had 3"):
        scheduler(section(file(tmp_path / "a", 4))).load_state_dict(state)
    more = [section(file(tmp_path / name, 3)) for name in ("a", "b")]
    with pytest.raises(DataError, match="2 tasksets now, but there were 1"):
        scheduler(*more).load_state_dict(state)


async def test_pass_rates_reach_the_selector_of_their_taskset(tmp_path: Path):
    plain = section(file(tmp_path / "a", 3))
    curriculum = section(
        file(tmp_path / "b", 6),
        data_selector={
            "selector_type": "difficulty_based",
            "feature_keys": ["low", "high"],
            "kwargs": {"tau": 0},
        },
    )
    source = scheduler(plain, curriculum)
    before = source.metrics()["selection/taskset_1/mean_pass_rate"]
    source.feedback({SELECTOR_METRIC: {1: {"indices": [2, 3], "values": [1.0, 1.0]}}})
    assert source.metrics()["selection/taskset_1/mean_pass_rate"] > before
    source.feedback({"experience_pipeline/experience_count": 3.0})


def test_eval_takes_every_row(tmp_path: Path):
    tasks = read_all(section(file(tmp_path, 5, "test.jsonl"), split="test"))
    assert [task.truth for task in tasks] == [0, 1, 2, 3, 4]
    assert all(task.is_eval and task.repeat_times == 1 for task in tasks)


def test_eval_repeats_each_row_as_often_as_it_says(tmp_path: Path):
    tasks = read_all(section(file(tmp_path, 2, "test.jsonl"), split="test", repeat_times=3))
    assert [task.repeat_times for task in tasks] == [3, 3]


BAD_LINES = [
    '{"q": "fine", "a": 1}',
    '{"q": "no answer"}',
    '{"q": null, "a": 1}',
    '{"q": 7, "a": 1}',
    '{"q": "cut',
    '{"q": "empty", "a": " "}',
    '{"q": "fine too", "a": 2}',
]


def test_bad_rows_are_reported_all_at_once(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("\n".join(BAD_LINES))
    with pytest.raises(BadRowError) as error:
        open_taskset(section(str(tmp_path)))
    assert str(error.value).splitlines() == [
        "5 bad rows. Mend them, or set on_bad_row: skip to leave such rows out.",
        "  train.jsonl, line 2, 'a': missing; the row has q",
        "  train.jsonl, line 3, 'q': null",
        "  train.jsonl, line 4, 'q': of type int, not text",
        "  train.jsonl, line 5: not JSON (Unterminated string starting at: line 1 column 7 "
        "(char 6))",
        "  train.jsonl, line 6, 'a': empty",
    ]


def test_bad_rows_can_be_left_out_and_are_counted(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("\n".join(BAD_LINES))
    taskset = open_taskset(section(str(tmp_path), on_bad_row="skip"))
    assert (len(taskset), taskset.num_bad) == (2, 5)
    assert [task.truth for task in taskset.next_tasks(3)] == [1, 2, 1]


def test_a_taskset_of_bad_rows_only_is_an_error(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text(BAD_LINES[2])
    with pytest.raises(DataError, match="All 1 rows are bad"):
        open_taskset(section(str(tmp_path), on_bad_row="skip"))


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [
        ({"path": "missing/x.jsonl"}, "path", "There is no data at"),
        ({"path": None}, "path", "has no path"),
        ({"split": "dev"}, "split", "It has: train"),
        ({"split": "train[:0]"}, "split", "is empty"),
        ({"format": {"prompt_key": "question"}}, "format.prompt_key", "it has: q, a, low, high"),
        ({"format": {"response_key": "b"}}, "format.response_key", "'b' is no column"),
        ({"data_selector": {"selector_type": "shufle"}}, "data_selector.selector_type", "shuffle"),
    ],
)
def test_problems_name_key_and_remedy(fields: dict, key: str, message: str, tmp_path: Path):
    [problem] = check_taskset(section(**{"path": file(tmp_path, 3), **fields}))
    assert problem.key == key
    assert message in problem.message


def test_a_good_taskset_has_no_problem(tmp_path: Path):
    assert check_taskset(section(file(tmp_path, 3))) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"q": "\u00e9", "a": "1"}\n'.encode("latin-1"), "not UTF-8"),
        (b'[{"q": "1", "a": "1"}]\n', "a JSON list, not an object"),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_rows_that_none_can_be_read_of_are_told_before_their_columns(
    content: bytes, reason: str, on_bad_row: str, tmp_path: Path
):
    (tmp_path / "train.jsonl").write_bytes(content)
    taskset = section(str(tmp_path / "train.jsonl"), on_bad_row=on_bad_row)
    [problem] = check_taskset(taskset)
    assert problem.key == "path"
    assert "train.jsonl, line 1" in problem.message and reason in problem.message
    buffer = ExperienceBufferConfig(
        path=taskset.path, storage_type="file", schema_type="sft", on_bad_row=on_bad_row
    )
    [problem] = check_experience_buffer(buffer)
    assert "train.jsonl, line 1" in problem.message and reason in problem.message


def test_data_sets_of_experiences_are_checked_too(tmp_path: Path):
    path = file(tmp_path, 3)
    plain = {"prompt_type": "plaintext", "prompt_key": "q"}
    config = ExperienceBufferConfig(
        path=path, storage_type="file", schema_type="sft", format={**plain, "response_key": "x"}
    )
    [problem] = check_experience_buffer(config)
    assert problem.key == "format.response_key"
    config.format.response_key = "a"
    [problem] = check_experience_buffer(config)
    assert all(
        f"train.jsonl, line {line}, 'a': of type int" in problem.message for line in (1, 2, 3)
    )
    config.format.response_key = "q"
    assert check_experience_buffer(config) == []
    queue = ExperienceBufferConfig(
        storage_type="queue", replay_buffer={"enable": True, "priority_fn": "linear_decoy"}
    )
    [problem] = check_experience_buffer(queue)
    assert "linear_decay" in problem.message


def test_loading_shows_how_far_it_is_if_asked(tmp_path: Path, capfd):
    open_taskset(section(file(tmp_path, 30)))
    assert capfd.readouterr().err == ""
    open_taskset(section(file(tmp_path, 30), name="sums", enable_progress_bar=True))
    shown = capfd.readouterr().err
    assert "Loading sums" in shown and "100%" in shown
