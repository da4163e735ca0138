"""Names in a job's folder, and which checkpoints in it are whole.

<job>/global_step_<N>/actor/    model_world_size_<W>_rank_<R>.pt, optim_..., extra_state_...,
                                fsdp_config.json, huggingface/
                                or of Megatron: model/dist_ckpt/, optimizer/dist_ckpt/,
                                extra/dist_ckpt/, num_steps.json, huggingface/
<job>/global_step_<N>/critic/   the same
<job>/<name>_meta.json          where explorer, trainer and stages stand
<job>/latest_checkpointed_iteration.txt, latest_state_dict_iteration.txt
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trinity.checkpoint import atomic

LATEST_CHECKPOINT = "latest_checkpointed_iteration.txt"
LATEST_WEIGHTS = "latest_state_dict_iteration.txt"
HUGGING_FACE = "huggingface"
ACTOR, CRITIC = "actor", "critic"
FSDP_CONFIG = "fsdp_config.json"
LORA_ADAPTER = "lora_adapter"
TINKER = "tinker.json"
DIST_CHECKPOINT = "dist_ckpt"
STEPS = "num_steps.json"

_STEP = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def dist_checkpoint(folder: Path) -> Path:
    """Where Megatron's weights lie, or would lie, in a model folder (``.../actor``)."""
    of_verl = Path(folder) / "model" / DIST_CHECKPOINT
    return of_verl if of_verl.is_dir() else Path(folder) / DIST_CHECKPOINT


def step_folder(job: Path, step: int) -> Path:
    """``<job>/global_step_<step>``."""
    return Path(job) / f"global_step_{step}"


def step_of(folder: Path) -> int:
    """N of ``global_step_N``."""
    match = _STEP.fullmatch(Path(folder).name)
    if match is None:
        raise ValueError(f"{folder} is not a checkpoint folder: its name is not global_step_<N>.")
    return int(match[1])


def shard_name(kind: str, world_size: int, rank: int) -> str:
    """File of one rank; ``kind`` is "model", "optim" or "extra_state"."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def world_size_of(folder: Path) -> int:
    """Ranks that saved the shards in a model folder (``.../actor``).

    veRL saves a step anew beside the shards of other ranks that may be there: `FSDP_CONFIG` says
    whose are the newest.

    Raises:
        FileNotFoundError: There are no shards, or some are missing.
    """
    found: dict[int, set[int]] = {}
    for path in Path(folder).glob("model_world_size_*_rank_*.pt"):
        if (match := _SHARD.fullmatch(path.name)) is not None:
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    if not found:
        raise FileNotFoundError(f"{folder} holds no model_world_size_<W>_rank_<R>.pt.")
    if (noted := _noted_world_size(Path(folder))) in found:
        found = {noted: found[noted]}
    for world_size, ranks in sorted(found.items(), reverse=True):
        if ranks == set(range(world_size)):
            return world_size
    world_size, ranks = max(found.items())
    missing = sorted(set(range(world_size)) - ranks)
    raise FileNotFoundError(
        f"{folder} holds shards of {world_size} ranks, but those of rank {missing} are missing."
    )


def _noted_world_size(folder: Path) -> int:
    """What `FSDP_CONFIG` says; 0 if it says nothing."""
    try:
        return int(json.loads((folder / FSDP_CONFIG).read_text())["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def checkpoints(job: Path) -> list[Path]:
    """All ``global_step_N`` folders of a job, oldest step first, whole or not."""
    folders = [p for p in Path(job).glob("global_step_*") if _STEP.fullmatch(p.name)]
    return sorted((p for p in folders if p.is_dir()), key=step_of)


def faults_of(folder: Path) -> list[str]:
    """What keeps a run from going on from ``global_step_N``; empty if it is whole.

    Folders of veRL have no marker; there all ranks' model shards must be present.
    """
    if (folder / atomic.MARKER).exists():
        return atomic.faults(folder)
    actor = folder / ACTOR
    if dist_checkpoint(actor).is_dir():
        return []
    try:
        world_size_of(actor)
    except FileNotFoundError as error:
        return [str(error)]
    return []


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, and what was passed over on the way to it."""

    folder: Path | None
    torn: dict[str, str] = field(default_factory=dict)
    """Name of a broken folder -> what is wrong with it."""


def find_latest(job: Path) -> Found:
    """The newest whole checkpoint of a job; folder is None if there is none."""
    torn = {p.name: "saving it did not end" for p in Path(job).glob(".global_step_*.saving")}
    for folder in reversed(checkpoints(job)):
        faults = faults_of(folder)
        if not faults:
            return Found(folder, torn)
        torn[folder.name] = "; ".join(faults[:3])
    return Found(None, torn)


def has_whole(job: Path) -> bool:
    """Whether a job has a whole checkpoint, or will have one by `end_saves`."""
    return find_latest(job).folder is not None or any(_whole_asides(job))


def end_saves(job: Path) -> None:
    """Put in place what a save had whole when it was killed, between the two renames of its end.

    Nobody may be saving meanwhile.
    """
    for aside, folder in list(_whole_asides(job)):
        aside.rename(folder)


def _whole_asides(job: Path) -> Iterator[tuple[Path, Path]]:
    """Whole folders of saves that wait for their last rename, and where they belong."""
    for aside in Path(job).glob(".global_step_*.saving"):
        folder = aside.with_name(aside.name.removeprefix(".").removesuffix(".saving"))
        is_step = folder.name.removeprefix("global_step_").isdigit()
        if is_step and not folder.exists() and not atomic.faults(aside):
            yield aside, folder


def drop_torn(job: Path) -> list[str]:
    """Remove what interrupted saves left behind; their names. Nobody may be saving meanwhile."""
    leftovers = list(Path(job).glob(".global_step_*.saving"))
    for path in leftovers:
        shutil.rmtree(path)
    return sorted(path.name for path in leftovers)


def drop_old(job: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest whole checkpoints (0 keeps all); those removed.

    Broken folders are not counted and not touched.
    """
    if keep <= 0:
        return []
    whole = [folder for folder in checkpoints(job) if not faults_of(folder)]
    removed = whole[:-keep]
    for folder in removed:
        away = folder.with_name(f".{folder.name}.dropped.saving")
        folder.rename(away)
        shutil.rmtree(away)
    return removed


def write_latest(job: Path, step: int, name: str = LATEST_CHECKPOINT) -> None:
    """Note ``step`` as the newest checkpoint, or with `LATEST_WEIGHTS` as the newest weights."""
    atomic.write_text(Path(job) / name, f"{step}\n")


def read_latest(job: Path, name: str = LATEST_CHECKPOINT) -> int | None:
    """The step noted by `write_latest`; None if there is none."""
    path = Path(job) / name
    return int(path.read_text()) if path.is_file() else None


def write_meta(folder: Path, name: str, meta: Mapping[str, object]) -> None:
    """Write ``<name>_meta.json`` in a job's folder, or in one of its checkpoints."""
    atomic.write_text(Path(folder) / f"{name}_meta.json", json.dumps(meta, indent=2))


def read_meta(folder: Path, name: str) -> dict[str, object]:
    """What `write_meta` wrote; {} if nothing was.

    Raises:
        ValueError: The file is damaged.
    """
    path = Path(folder) / f"{name}_meta.json"
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); restore or delete it.") from error
    if not isinstance(meta, dict):
        raise ValueError(
            f"{path} holds {type(meta).__name__}, not an object; restore or delete it."
        )
    return meta
