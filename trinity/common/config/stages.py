"""A file with `stages` -> one configuration for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from trinity.common.config.root import Config, StageConfig
from trinity.common.constants import SaveHF, SyncMethod

_WHOLE = frozenset(("taskset", "experience_buffer", "auxiliary_buffers", "output", "inputs"))
"""Keys that a stage replaces as a whole: half of one data set and half of another make none."""

_SECTIONS = ("algorithm", "buffer", "data_processor", "explorer", "trainer")


class Stage(NamedTuple):
    """One run of a file. A file without stages is one stage without a name."""

    name: str
    config: Config


def iterate_stages(config: Config) -> Iterator[Stage]:
    """The stages of ``config`` in order, each a whole configuration of its own.

    A stage takes over what it does not say. Its name is added to the experiment's, and it
    leaves a Hugging Face model behind if another one follows.
    """
    if not config.stages:
        yield Stage("", config)
        return
    base = config.model_dump(exclude_unset=True, exclude={"stages"})
    for index, stage in enumerate(config.stages):
        merged = _stage_config(config, base, stage)
        has_successor = index + 1 < len(config.stages)
        if has_successor and merged.trainer.save_hf_checkpoint is SaveHF.NEVER:
            merged.trainer.save_hf_checkpoint = SaveHF.LAST
        yield Stage(stage.stage_name, merged)


def _stage_config(config: Config, base: dict[str, Any], stage: StageConfig) -> Config:
    data = dict(base)
    if stage.mode is not None:
        data["mode"] = stage.mode
    for section in _SECTIONS:
        own = getattr(stage, section)
        if own is None:
            continue
        inherited = dict(base.get(section, {}))
        changes = own.model_dump(exclude_unset=True)
        if section == "algorithm" and _is_other_algorithm(config, changes):
            inherited = {k: v for k, v in inherited.items() if k == "optimizer"}
        data[section] = _merge(inherited, changes)
    merged = Config.model_validate(data)
    merged.name = f"{config.name}/{stage.stage_name}"
    merged.checkpoint_job_dir = ""
    _fit_to_mode(merged)
    merged._source = config.source
    return merged


def _is_other_algorithm(config: Config, changes: dict[str, Any]) -> bool:
    own = changes.get("algorithm_type")
    return own is not None and own != config.algorithm.algorithm_type


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``, key by key through sections."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict) and key not in _WHOLE:
            value = _merge(old, value)
        merged[key] = value
    if "tasksets" in changes:
        merged.pop("taskset", None)
    elif "taskset" in changes:
        merged.pop("tasksets", None)
    return merged


def _fit_to_mode(config: Config) -> None:
    """What holds for the whole file and not for a stage of another mode is left open again."""
    synchronizer = config.synchronizer
    together = (SyncMethod.NCCL, SyncMethod.MEMORY)
    if synchronizer.sync_method in together and not config.mode.pairs:
        synchronizer.sync_method = None
