import os
import re
from pathlib import Path

import pytest

from trinity.checkpoint import layout
from trinity.checkpoint.atomic import writing_folder
from trinity.common.config import Config
from trinity.launcher.job import (
    JobCheckpoints,
    JobFolder,
    StageLog,
    find_resume_point,
    lost_checkpoints,
    lost_stage,
    named_anew,
    writable_problem,
)


def save(checkpoints: JobCheckpoints, step: int) -> None:
    """What a train engine does with the files of a checkpoint."""
    with writing_folder(Path(checkpoints.folder(step))) as aside:
        for name, content in checkpoints.snapshot().items():
            assert not callable(content)
            data = content if isinstance(content, bytes) else content.encode()
            (aside / name).write_bytes(data)
    checkpoints.complete(step)


def notes(job: JobFolder) -> tuple[int | None, int | None]:
    """The newest checkpoint and the newest weights, as files of the job name them."""
    return layout.read_latest(job.path), layout.read_latest(job.path, layout.LATEST_WEIGHTS)


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    job = JobFolder(tmp_path / "project" / "name")
    job.create()
    return job


def test_folders(job: JobFolder) -> None:
    assert {path.name for path in job.path.iterdir()} == {"log", "monitor", "buffer"}
    job.create()
    assert job.weights.parent == job.path


def test_a_resume_finds_the_state_of_every_part(job: JobFolder) -> None:
    steps = {"trainer": 0}
    checkpoints = JobCheckpoints(
        job,
        parts={"trainer": lambda: {"step": steps["trainer"]}, "explorer": lambda: {"tasks": [1]}},
        files=lambda: {"unread.bin": b"\x00\x01"},
    )
    for step in (1, 2):
        steps["trainer"] = step
        save(checkpoints, step)
    point = find_resume_point(job, pytest.fail)
    assert point is not None and point.step == 2
    assert point.state("trainer") == {"step": 2} and point.state("explorer") == {"tasks": [1]}
    assert point.state("nobody") is None
    assert point.file("unread.bin") == b"\x00\x01" and point.file("nothing") is None
    assert (job.path / "trainer_meta.json").read_text() == '{"step": 2}'


def test_torn_checkpoints_are_named_and_left_out(job: JobFolder) -> None:
    checkpoints = JobCheckpoints(job, parts={"trainer": lambda: {"step": 1}})
    save(checkpoints, 1)
    save(checkpoints, 2)
    meta = job.path / "global_step_2" / "trainer_meta.json"
    meta.write_text("")
    said: list[str] = []
    point = find_resume_point(job, said.append)
    assert point is not None and point.step == 1
    assert len(said) == 1 and "global_step_2" in said[0] and "trainer_meta.json" in said[0]


def test_a_job_whose_checkpoints_are_all_broken_is_told(job: JobFolder) -> None:
    assert lost_checkpoints(job) is None
    checkpoints = JobCheckpoints(job, parts={"trainer": lambda: {"step": 1}})
    for step in (1, 2):
        save(checkpoints, step)
        (job.path / f"global_step_{step}" / "trainer_meta.json").write_text("")
    problem = lost_checkpoints(job)
    assert problem is not None and problem.key == "continue_from_checkpoint"
    assert "global_step_2: trainer_meta.json has 0 of" in problem.message
    assert "global_step_1: " in problem.message and "Restore one" in str(problem.fix)
    (job.path / ".global_step_3.saving").mkdir()  # a save that was killed in its midst
    assert lost_checkpoints(job) is not None
    save(checkpoints, 3)
    assert lost_checkpoints(job) is None


def test_a_save_that_only_waits_for_its_name_is_whole(job: JobFolder) -> None:
    checkpoints = JobCheckpoints(job, parts={"trainer": lambda: {"step": 1}})
    save(checkpoints, 1)
    save(checkpoints, 2)
    (job.path / "global_step_1" / "trainer_meta.json").write_text("")
    (job.path / "global_step_2").rename(job.path / ".global_step_2.saving")
    assert lost_checkpoints(job) is None


def test_a_save_killed_before_the_first_checkpoint_begins_anew(job: JobFolder) -> None:
    (job.path / ".global_step_1.saving").mkdir()
    assert lost_checkpoints(job) is None


def test_a_finished_stage_without_its_model_is_told(job: JobFolder) -> None:
    problem = lost_stage("warmup", job)
    assert problem is not None and "Stage warmup was finished" in problem.message
    save(JobCheckpoints(job, parts={"trainer": dict}), 1)
    assert lost_stage("warmup", job) is None


def test_an_empty_job_has_no_resume_point(job: JobFolder) -> None:
    assert find_resume_point(job, pytest.fail) is None


def test_old_checkpoints_are_dropped(job: JobFolder) -> None:
    checkpoints = JobCheckpoints(job, keep=2, parts={"trainer": dict})
    for step in range(1, 5):
        save(checkpoints, step)
    assert sorted(p.name for p in job.path.glob("global_step_*")) == [
        "global_step_3",
        "global_step_4",
    ]


def test_stages(job: JobFolder) -> None:
    assert StageLog(job.path).latest() == -1
    StageLog(job.path).finish(0)
    StageLog(job.path).finish(1)
    assert StageLog(job.path).latest() == 1


def test_a_finished_stage_of_which_more_steps_are_asked_says_how_it_goes_on(job: JobFolder) -> None:
    checkpoints = JobCheckpoints(job, parts={"trainer": lambda: {"step": 2}})
    log = StageLog(job.path)
    assert log.why_skipped(1, "rft", job, 3) == "Stage rft was finished before; skipped."
    save(checkpoints, 2)
    assert log.why_skipped(1, "rft", job, 2) == "Stage rft was finished before; skipped."
    told = log.why_skipped(1, "rft", job, 3)
    assert "2 of 3 steps" in told and '{"latest_stage": 0}' in told and "stage_meta.json" in told


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert writable_problem(tmp_path / "not" / "yet" / "there") is None
    assert "is a file: name a folder" in (writable_problem(tmp_path / "file" / "x") or "")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="Linux")
def test_a_folder_in_which_not_even_root_can_make_one() -> None:
    assert "/proc can't be written to" in (writable_problem(Path("/proc/x")) or "")


def test_the_trial_leaves_nothing(tmp_path: Path) -> None:
    assert writable_problem(tmp_path / "x") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "can't be written to" in (writable_problem(tmp_path / "closed" / "x") or "")


def test_a_checkpoint_is_noted_with_its_weights_unless_newer_ones_are_out(job: JobFolder) -> None:
    checkpoints = JobCheckpoints(job)
    save(checkpoints, 2)
    assert notes(job) == (2, 2)
    layout.write_latest(job.path, 5, layout.LATEST_WEIGHTS)
    save(checkpoints, 4)
    assert notes(job) == (4, 5)


@pytest.mark.parametrize(
    "told",
    [
        {"continue_from_checkpoint": False},
        {"trainer": {"trainer_config": {"trainer": {"resume_mode": "disable"}}}},
    ],
)
def test_a_job_that_may_not_go_on_gets_a_name_of_its_own(
    told: dict[str, object], tmp_path: Path
) -> None:
    def name(**more: object) -> str:
        job = {"checkpoint_root_dir": str(tmp_path), "project": "p", "name": "n"}
        model = {"model_path": "m", "max_model_len": 64}
        return named_anew(Config.model_validate({**job, "model": model, **more})).name

    assert name(**told) == "n"  # nothing is there to go on from
    (tmp_path / "p" / "n" / "log").mkdir(parents=True)
    assert name() == "n"
    assert re.fullmatch(r"n_\d{14}", name(**told))
