"""A user's configuration -> the same with every open value filled in. Touches no disk or network.

Only what the file itself determines is filled in; GPUs found, folders and ports are facts of
`trinity.launcher.plan`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from trinity.common.config.algorithm import LOSS_AGG_MODES
from trinity.common.config.algorithm_table import ALGORITHMS, AlgorithmSpec
from trinity.common.config.derive_data import derive_data
from trinity.common.config.derive_model import derive_models
from trinity.common.config.derive_trainer import derive_trainer
from trinity.common.config.fill import Derived, Filler
from trinity.common.config.root import Config
from trinity.common.config.verl.apply import apply_verl
from trinity.common.constants import (
    ENV_CHECKPOINT_ROOT_DIR,
    EngineType,
    Mode,
    SyncMethod,
    TrainerType,
)

POLICY_LOSS_AGG = {"gspo": "seq-mean-token-mean"}
"""Policy losses that are defined with another aggregation than token-mean."""

ADVANTAGE_WITH_VALUES = "ppo"
"""The advantage function that takes a critic's values."""

_ANY_ALGORITHM = AlgorithmSpec(advantage_fn=None, repeat_times=1, min_repeat_times=1)
_COMPONENTS = (
    "advantage_fn",
    "policy_loss_fn",
    "kl_loss_fn",
    "kl_penalty_fn",
    "entropy_loss_fn",
    "sample_strategy",
    "repeat_times",
)


class Derivation(NamedTuple):
    """A filled configuration, and a note on each value that was filled in."""

    config: Config
    notes: list[Derived]


def derive(config: Config, env: Mapping[str, str] = os.environ) -> Derivation:
    """Fill in every value that ``config`` leaves open and the file determines.

    A value of the user's is never replaced, but for `explorer.eval_interval`, which is rounded
    down to a multiple of the sync interval. Deriving twice changes nothing.
    """
    filler = Filler(config)
    apply_verl(filler)
    spec = spec_of(config)
    _derive_places(filler, env)
    _derive_algorithm(filler, spec)
    derive_models(filler)
    _derive_sync(filler)
    derive_data(filler, spec)
    _derive_eval_interval(filler, spec)
    derive_trainer(filler, spec)
    return Derivation(filler.config, filler.notes)


def spec_of(config: Config) -> AlgorithmSpec:
    """The algorithm of ``config``; that of a plugin which is not loaded has plain defaults."""
    return ALGORITHMS.get(config.algorithm.algorithm_type, _ANY_ALGORITHM)


def needs_reference(config: Config) -> bool:
    """Whether a frozen reference model takes part. ``config`` must be filled in."""
    algorithm = config.algorithm
    kl = {algorithm.kl_loss_fn, algorithm.kl_penalty_fn} - {None, "none"}
    return bool(kl) or algorithm.policy_loss_fn == "dpo"


def needs_critic(config: Config) -> bool:
    """Whether a value model is trained along: the algorithm has one, or its advantage needs one."""
    needs_values = config.algorithm.advantage_fn == ADVANTAGE_WITH_VALUES
    return spec_of(config).use_critic or needs_values


def job_path(config: Config) -> str:
    """`project/group/name` with an empty group left out."""
    return "/".join(part for part in (config.project, config.group, config.name) if part)


def _derive_places(filler: Filler, env: Mapping[str, str]) -> None:
    config = filler.config
    root = config.checkpoint_root_dir or env.get(ENV_CHECKPOINT_ROOT_DIR) or "./checkpoints"
    source = (
        "the default" if not env.get(ENV_CHECKPOINT_ROOT_DIR) else f"${ENV_CHECKPOINT_ROOT_DIR}"
    )
    why = "as an absolute path" if config.checkpoint_root_dir else source
    filler.put("checkpoint_root_dir", os.path.abspath(os.path.expanduser(root)), why)
    job = config.checkpoint_job_dir or os.path.join(config.checkpoint_root_dir, job_path(config))
    filler.put("checkpoint_job_dir", os.path.abspath(job), "root, project, group and name")
    filler.default("ray_namespace", job_path(config), "project, group and name")
    job = config.checkpoint_job_dir
    filler.default("log.save_dir", os.path.join(job, "log"), "in the job's folder")
    filler.default("monitor.cache_dir", os.path.join(job, "monitor"), "in the job's folder")


def _derive_algorithm(filler: Filler, spec: AlgorithmSpec) -> None:
    name = filler.config.algorithm.algorithm_type
    if filler.config.model.tinker.enable:
        why = "the Tinker service gives no entropies"
        filler.default("algorithm.entropy_loss_fn", "none", why)
    for component in _COMPONENTS:
        filler.default(f"algorithm.{component}", getattr(spec, component), f"default of {name}")
    algorithm = filler.config.algorithm
    own = (algorithm.policy_loss_fn_args or {}).get("loss_agg_mode")
    loss = algorithm.policy_loss_fn or ""
    if own in LOSS_AGG_MODES:  # what else stands there is told by a check
        why = "as in algorithm.policy_loss_fn_args"
    else:
        own, why = POLICY_LOSS_AGG.get(loss, "token-mean"), f"default of the loss {loss}"
    filler.default("algorithm.loss_agg_mode", own, why)


def _derive_sync(filler: Filler) -> None:
    method, why = default_sync_method(filler.config)
    filler.default("synchronizer.sync_method", method, why)
    for side in ("explorer", "trainer"):
        filler.copy(f"synchronizer.{side}_sync_interval", "synchronizer.sync_interval")


def default_sync_method(config: Config) -> tuple[SyncMethod, str]:
    """How weights travel where the file does not say, and why."""
    if not config.mode.pairs:
        return SyncMethod.CHECKPOINT, f"mode {config.mode} has one side only"
    if config.trainer.trainer_type is TrainerType.TINKER:
        return SyncMethod.CHECKPOINT, "the Tinker service keeps the weights"
    if config.mode is Mode.COLOCATE:
        return SyncMethod.MEMORY, "trainer and engine share GPUs"
    if config.explorer.rollout_model.engine_type is EngineType.TORCH:
        return SyncMethod.MEMORY, "the embedded engine takes weights from memory"
    if config.model.lora_configs:
        return SyncMethod.CHECKPOINT, "adapters are small files"
    return SyncMethod.NCCL, "explorer and trainer run side by side"


def _derive_eval_interval(filler: Filler, spec: AlgorithmSpec) -> None:
    config = filler.config
    is_rollout = config.mode.pairs or config.mode is Mode.EXPLORE
    if not is_rollout or spec.schema != "experience":
        return
    sync = config.synchronizer.explorer_sync_interval or config.synchronizer.sync_interval
    wanted = config.explorer.eval_interval
    rounded = max(wanted // sync, 1) * sync
    why = f"{wanted} in the file, to a multiple of the sync interval {sync}"
    filler.put("explorer.eval_interval", rounded, why)
