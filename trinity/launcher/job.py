"""The folder of a job: its subfolders, its checkpoints and the point a resume starts from."""

import json
import math
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trinity.checkpoint import layout
from trinity.checkpoint.atomic import Content, write_text
from trinity.common.config import Config, derive
from trinity.common.constants import Mode
from trinity.common.errors import Problem
from trinity.utils.log import get_logger

State = dict[str, object]

_MAX_SHOWN = 3


@dataclass(frozen=True)
class JobFolder:
    """``<root>/<project>[/<group>]/<name>`` and what lies where in it."""

    path: Path

    @property
    def log(self) -> Path:
        """One log file for each part."""
        return self.path / "log"

    @property
    def monitor(self) -> Path:
        """Files of the monitor."""
        return self.path / "monitor"

    @property
    def buffer(self) -> Path:
        """Databases and files of the buffers."""
        return self.path / "buffer"

    @property
    def weights(self) -> Path:
        """Weights on their way to engines that fetch them from disk."""
        return self.path / "weights"

    def serving_key(self) -> str:
        """What clients of mode `serve` must send: ``TRINITY_API_KEY``, else one kept in the job."""
        if os.environ.get("TRINITY_API_KEY"):
            return os.environ["TRINITY_API_KEY"]
        file = self.path / "api_key.txt"
        if not file.exists():
            with open(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as out:
                out.write(secrets.token_urlsafe(24))
        return file.read_text().strip()

    def create(self) -> None:
        """Make the folder and its subfolders. `OSError` if that is not allowed."""
        for folder in (self.path, self.log, self.monitor, self.buffer):
            folder.mkdir(parents=True, exist_ok=True)


@dataclass
class JobCheckpoints:
    """The checkpoints of a job (`trinity.trainer.trainer.Checkpoints`).

    Args:
        job: Whose checkpoints.
        keep: Newest checkpoints that are kept; 0 keeps all.
        parts: Name of a part ("trainer", "explorer") -> its state; written as ``<name>_meta.json``
            into each checkpoint and into the job folder.
        files: Further files of a checkpoint, such as unread experiences.
    """

    job: JobFolder
    keep: int = 0
    parts: Mapping[str, Callable[[], State]] = field(default_factory=dict)
    files: Callable[[], Mapping[str, Content]] = dict
    _taken: Mapping[str, str] = field(default_factory=dict)

    def folder(self, step: int) -> str:
        return str(layout.step_folder(self.job.path, step))

    def snapshot(self) -> dict[str, Content]:
        metas = {meta_name(part): json.dumps(state()) for part, state in self.parts.items()}
        self._taken = metas
        return {**metas, **self.files()}

    def complete(self, step: int) -> None:
        for name, text in self._taken.items():
            write_text(self.job.path / name, text)
        layout.write_latest(self.job.path, step)
        if (layout.read_latest(self.job.path, layout.LATEST_WEIGHTS) or 0) < step:
            layout.write_latest(self.job.path, step, layout.LATEST_WEIGHTS)
        layout.drop_old(self.job.path, self.keep)
        get_logger("checkpoint_monitor").info("The checkpoint of step %d is complete.", step)


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint a run goes on from."""

    step: int
    folder: Path

    def state(self, part: str) -> State | None:
        """State of ``part`` as of this checkpoint, or None if it had none."""
        path = self.folder / meta_name(part)
        return json.loads(path.read_text()) if path.exists() else None

    def file(self, name: str) -> bytes | None:
        """A further file of the checkpoint, or None."""
        path = self.folder / name
        return path.read_bytes() if path.exists() else None


def meta_name(part: str) -> str:
    """``explorer_meta.json`` ..."""
    return f"{part}_meta.json"


def find_resume_point(job: JobFolder, log: Callable[[str], None]) -> ResumePoint | None:
    """The newest whole checkpoint of the job, or None; torn ones are named through ``log``."""
    found = layout.find_latest(job.path)
    for name, fault in found.torn.items():
        log(f"Checkpoint {name} is not whole and is left out: {fault}.")
    if found.folder is None:
        return None
    return ResumePoint(layout.step_of(found.folder), found.folder)


def lost_checkpoints(job: JobFolder) -> Problem | None:
    """What is said where a job has checkpoints and none of them is whole; None else."""
    if not layout.checkpoints(job.path) or layout.has_whole(job.path):
        return None
    torn = layout.find_latest(job.path).torn
    shown = "; ".join(f"{name}: {torn[name]}" for name in list(torn)[:_MAX_SHOWN])
    return Problem(
        "continue_from_checkpoint",
        f"No checkpoint in {job.path} is whole, so training would begin anew ({shown}).",
        "Restore one of them. To begin anew, set it to false (under a new name) or delete them.",
        True,
    )


def lost_stage(name: str, job: JobFolder) -> Problem | None:
    """What is said where a finished stage has no model left for the next one; None else."""
    if layout.has_whole(job.path):
        return None
    return Problem(
        "stages",
        f"Stage {name} was finished before, but {job.path} has no whole checkpoint any more, and "
        "the next stage starts from it.",
        f"Restore it, or delete {job.path.parent}/stage_meta.json to train the stage again.",
    )


def named_anew(config: Config) -> Config:
    """``config`` as it is if it may go on or its folder is empty, else under a fresh name.

    With `continue_from_checkpoint: false`, or veRL's word for it, a job that has files already gets
    the time of now behind its name; its stages then go on in that folder.
    """
    filled = derive(config).config
    folder = Path(filled.checkpoint_job_dir)
    is_new = not folder.exists() or not any(folder.iterdir())
    if filled.continue_from_checkpoint or config.mode is Mode.BENCH or is_new:
        return config
    suffix = time.strftime("_%Y%m%d%H%M%S")
    changes: dict[str, object] = {"name": config.name + suffix}
    if config.checkpoint_job_dir:
        changes["checkpoint_job_dir"] = config.checkpoint_job_dir.rstrip("/") + suffix
    return config.model_copy(update=changes)


def writable_problem(root: Path) -> str | None:
    """Why nothing can be written below ``root``, in one sentence, or None."""
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"checkpoint_root_dir is {root}, but {existing} is a file: name a folder."
    trouble = _trouble_with(existing)
    if trouble is not None:
        return (
            f"checkpoint_root_dir is {root}, but {existing} can't be written to ({trouble}): name "
            "another folder, or set TRINITY_CHECKPOINT_ROOT_DIR."
        )
    return None


def _trouble_with(folder: Path) -> str | None:
    """Why no folder can be made in another. It is tried: root may all, but not in /proc, say."""
    try:
        Path(tempfile.mkdtemp(prefix=".trinity_trial_", dir=folder)).rmdir()
    except OSError as error:
        return error.strerror or str(error)
    return None


class StageLog:
    """Which stages of a job are finished: ``stage_meta.json``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "stage_meta.json"

    def latest(self) -> int:
        """Index of the last finished stage; -1 if none is."""
        if not self._path.exists():
            return -1
        return int(json.loads(self._path.read_text()).get("latest_stage", -1))

    def why_skipped(self, index: int, name: str, job: JobFolder, total_steps: int | None) -> str:
        """What is said of a finished stage, and how it goes on where more steps are asked of it."""
        text = f"Stage {name} was finished before; skipped."
        newest = layout.find_latest(job.path).folder
        done = layout.step_of(newest) if newest is not None else math.inf
        if done >= (total_steps or 0):
            return text
        earlier = json.dumps({"latest_stage": index - 1})
        how = f"to go on with it, write {earlier} into {self._path}"
        return f"{text} It has {done} of {total_steps} steps: {how}."

    def finish(self, index: int) -> None:
        """Stage ``index`` is done."""
        write_text(self._path, json.dumps({"latest_stage": index}))
