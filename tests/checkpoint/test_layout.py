import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trinity.checkpoint import atomic, layout


def saved(job, step: int, content: str = "x"):
    folder = layout.step_folder(job, step)
    with atomic.writing_folder(folder) as aside:
        (aside / "actor").mkdir()
        (aside / "actor" / "weights").write_text(content)
    return folder


def test_a_folder_appears_whole_and_is_replaced_whole(tmp_path):
    folder = saved(tmp_path, 1, "old")
    saved(tmp_path, 1, "new")
    assert (folder / "actor" / "weights").read_text() == "new"
    assert layout.faults_of(folder) == []
    with pytest.raises(RuntimeError), atomic.writing_folder(folder) as aside:
        (aside / "half").write_text("")
        raise RuntimeError
    assert (folder / "actor" / "weights").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_the_newest_whole_checkpoint_is_found_and_torn_ones_are_named(tmp_path):
    for step in (9, 10, 11, 12):
        saved(tmp_path, step)
    (tmp_path / "global_step_12" / "actor" / "weights").write_text("cut")
    (tmp_path / "global_step_11" / "actor" / "weights").unlink()
    (tmp_path / ".global_step_13.saving").mkdir()
    found = layout.find_latest(tmp_path)
    assert found.folder == tmp_path / "global_step_10"
    assert set(found.torn) == {".global_step_13.saving", "global_step_12", "global_step_11"}
    assert "has 3 of 1 bytes" in found.torn["global_step_12"]
    assert layout.drop_torn(tmp_path) == [".global_step_13.saving"]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_save_killed_before_its_last_rename_is_ended(tmp_path, monkeypatch, was_there):
    """A step that is saved again was moved aside by then: neither copy is in its place."""
    if was_there:
        saved(tmp_path, 7)
    folder = tmp_path / "global_step_7"
    (atomic.begin_folder(folder) / "weights").write_text("new")
    rename = Path.rename

    def killed(path, target):
        if Path(target) == folder:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        atomic.finish_folder(folder)
    monkeypatch.undo()
    assert layout.find_latest(tmp_path).folder is None

    (atomic.begin_folder(tmp_path / "global_step_8") / "weights").write_text("half")
    layout.end_saves(tmp_path)
    assert layout.find_latest(tmp_path).folder == folder
    assert (folder / "weights").read_text() == "new"
    layout.drop_torn(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_7"]


def test_nothing_of_a_save_that_broke_off_gets_into_the_next_one(tmp_path):
    folder = tmp_path / "deep" / "global_step_7"
    (atomic.begin_folder(folder) / "torn").write_text("half")
    with pytest.raises(KeyError), atomic.writing_folder(folder) as aside:
        (aside / "more").write_text("half")
        raise KeyError
    assert list(folder.parent.iterdir()) == []
    for text in ("first", "second"):
        with atomic.writing_folder(folder) as aside:
            (aside / text).write_text(text)
        assert sorted(p.name for p in folder.iterdir()) == [atomic.MARKER, text]
    assert list(folder.parent.iterdir()) == [folder]
    atomic.begin_folder(folder)
    for _ in range(2):
        atomic.abandon_folder(folder)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_text_that_can_not_be_put_in_place_leaves_nothing(tmp_path):
    atomic.write_text(tmp_path / "a" / "b" / "text", "old")
    atomic.write_text(tmp_path / "a" / "b" / "text", "new")
    assert (tmp_path / "a" / "b" / "text").read_text() == "new"
    with pytest.raises(IsADirectoryError):
        atomic.write_text(tmp_path / "a" / "b", "text")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_only_folders_by_the_name_of_a_step_are_checkpoints(tmp_path):
    for name in ("global_step_x", "global_step_3.bak", "global_step_20", "global_step_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_9").touch()
    assert [path.name for path in layout.checkpoints(tmp_path)] == [
        "global_step_3",
        "global_step_20",
    ]
    with pytest.raises(ValueError, match="global_step_x is not a checkpoint folder"):
        layout.step_of(tmp_path / "global_step_x")


def test_no_checkpoint_at_all(tmp_path):
    assert layout.find_latest(tmp_path) == layout.Found(None, {})


def test_folders_of_verl_need_all_ranks(tmp_path):
    actor = tmp_path / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    torch.save({}, actor / layout.shard_name("model", 2, 0))
    assert "rank [1] are missing" in layout.find_latest(tmp_path).torn["global_step_3"]
    torch.save({}, actor / layout.shard_name("model", 2, 1))
    assert layout.find_latest(tmp_path).folder == tmp_path / "global_step_3"


def test_of_shards_of_two_saves_those_count_that_the_folder_says(tmp_path):
    """veRL saves a step anew into the folder that is there, on however many GPUs it now has."""
    for world_size in (4, 2):
        for rank in range(world_size):
            (tmp_path / layout.shard_name("model", world_size, rank)).touch()
    assert layout.world_size_of(tmp_path) == 4
    (tmp_path / layout.FSDP_CONFIG).write_text('{"FSDP_version": 2, "world_size": 2}')
    assert layout.world_size_of(tmp_path) == 2
    (tmp_path / layout.shard_name("model", 2, 1)).unlink()
    with pytest.raises(FileNotFoundError, match=r"shards of 2 ranks, but those of rank \[1\]"):
        layout.world_size_of(tmp_path)


def test_retention_counts_whole_checkpoints(tmp_path):
    for step in range(1, 7):
        saved(tmp_path, step)
    (tmp_path / "global_step_6" / "actor" / "weights").unlink()
    removed = layout.drop_old(tmp_path, keep=2)
    assert [path.name for path in removed] == [f"global_step_{n}" for n in (1, 2, 3)]
    assert layout.drop_old(tmp_path, keep=0) == []
    assert [path.name for path in layout.drop_old(tmp_path, keep=1)] == ["global_step_4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_5", "global_step_6"]


def test_pointers_and_metas(tmp_path):
    assert layout.read_latest(tmp_path) is None
    layout.write_latest(tmp_path, 7)
    assert layout.read_latest(tmp_path) == 7
    assert layout.read_meta(tmp_path, "trainer") == {}
    layout.write_meta(tmp_path, "trainer", {"latest_iteration": 7})
    assert layout.read_meta(tmp_path, "trainer") == {"latest_iteration": 7}
    (tmp_path / "trainer_meta.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        layout.read_meta(tmp_path, "trainer")
    (tmp_path / "trainer_meta.json").write_text("[]")
    with pytest.raises(ValueError, match="holds list, not an object"):
        layout.read_meta(tmp_path, "trainer")


_SAVER = """
import sys, time
from pathlib import Path
from trinity.checkpoint import atomic, layout
with atomic.writing_folder(layout.step_folder(Path(sys.argv[1]), 2)) as aside:
    (aside / "weights").write_bytes(b"0" * 1000)
    print("writing", flush=True)
    time.sleep(600)
"""


def test_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    saved(tmp_path, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", _SAVER, str(tmp_path)], stdout=subprocess.PIPE, env=dict(os.environ)
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    found = layout.find_latest(tmp_path)
    assert found.folder == tmp_path / "global_step_1"
    assert list(found.torn) == [".global_step_2.saving"]
