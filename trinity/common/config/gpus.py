"""Who gets which of the GPUs: engines what they ask for, the trainer the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.root import Config
from trinity.common.config.trainer import TrainerConfig
from trinity.common.constants import EngineType, Mode, TrainerStrategy, TrainerType
from trinity.common.errors import Problem

_KEYS = "cluster.gpu_per_node"


@dataclass(frozen=True)
class GPUSplit:
    """GPUs of a run. In mode `colocate` the trainer's and the rollout model's are the same."""

    nodes: int
    per_node: int
    rollout: int
    auxiliary: int
    trainer: int

    @property
    def total(self) -> int:
        """All GPUs of the cluster."""
        return self.nodes * self.per_node

    @property
    def explorer(self) -> int:
        """GPUs of all engines."""
        return self.rollout + self.auxiliary


def gpus_per_engine(model: InferenceModelConfig) -> int:
    """GPUs one engine of ``model`` takes; none where the model is elsewhere."""
    if model.engine_type in (EngineType.OPENAI, EngineType.TINKER):
        return 0
    if model.engine_type is EngineType.TORCH:
        return 1
    return model.tensor_parallel_size * model.data_parallel_size * model.pipeline_parallel_size


def split_gpus(config: Config, nodes: int, per_node: int) -> GPUSplit:
    """Split ``nodes`` machines with ``per_node`` GPUs each. A negative share means too few."""
    explorer = config.explorer
    explores = config.mode.explores
    rollout = explorer.rollout_model.engine_num * gpus_per_engine(explorer.rollout_model)
    auxiliary = sum(
        model.engine_num * gpus_per_engine(model) for model in explorer.auxiliary_models
    )
    rollout, auxiliary = (rollout, auxiliary) if explores else (0, 0)
    trainer = 0
    if config.mode.trains and config.trainer.trainer_type is not TrainerType.TINKER:
        shared = config.mode is Mode.COLOCATE
        trainer = nodes * per_node - auxiliary - (0 if shared else rollout)
    return GPUSplit(nodes, per_node, rollout, auxiliary, trainer)


def gpu_problems(config: Config, nodes: int, per_node: int) -> list[Problem]:
    """What does not fit on ``nodes`` machines with ``per_node`` GPUs each.

    ``config`` must be filled in. A cluster without GPUs is not judged here.
    """
    if nodes * per_node == 0:
        return []
    split = split_gpus(config, nodes, per_node)
    found = [*_too_few(config, split), *_broken_nodes(config, split)]
    return found or list(_indivisible(config, split))


def _too_few(config: Config, split: GPUSplit) -> Iterator[Problem]:
    total = f"{split.nodes} x {split.per_node} = {split.total}"
    plural = "" if split.explorer == 1 else "s"
    engines = f"The engines take {split.explorer} GPU{plural} ({_engine_sum(config)})"
    trains = config.mode.trains and config.trainer.trainer_type is not TrainerType.TINKER
    if split.explorer > split.total:
        message = f"{engines}, but the cluster has {total}."
        needs_more = trains and config.mode is not Mode.COLOCATE
        yield Problem(_KEYS, message, _fewer_engines(split, int(needs_more)), split.per_node)
    elif trains and split.trainer < 1:
        message = f"{engines} of {total}; none is left for the trainer."
        yield Problem(_KEYS, message, _fewer_engines(split, 1), split.per_node)
    elif config.mode is Mode.COLOCATE and split.rollout > split.trainer:
        message = f"{engines}, but they share the trainer's {split.trainer}."
        yield Problem(_KEYS, message, _fewer_engines(split, 0), split.per_node)


def _engine_sum(config: Config) -> str:
    parts = [_term("rollout_model", config.explorer.rollout_model)]
    for index, model in enumerate(config.explorer.auxiliary_models):
        parts.append(_term(f"auxiliary_models.{index}", model))
    return " + ".join(parts)


def _term(name: str, model: InferenceModelConfig) -> str:
    return f"{name} {model.engine_num} x {gpus_per_engine(model)}"


def _fewer_engines(split: GPUSplit, for_trainer: int) -> str:
    need = split.explorer + for_trainer
    nodes = -(-need // split.per_node)
    more = f"set `cluster.gpu_per_node` to at least {need}"
    if split.nodes > 1:
        more = f"set `cluster.node_num` to at least {nodes}"
    return (
        f"Lower `explorer.rollout_model.engine_num` or a `tensor_parallel_size`, or {more}; "
        "without GPUs, run with --cpu."
    )


def _broken_nodes(config: Config, split: GPUSplit) -> Iterator[Problem]:
    models = {"explorer.rollout_model": config.explorer.rollout_model}
    for index, auxiliary in enumerate(config.explorer.auxiliary_models):
        models[f"explorer.auxiliary_models.{index}"] = auxiliary
    for key, model in models.items() if config.mode.explores else ():
        size = gpus_per_engine(model)
        if size > split.per_node and size % split.per_node:
            message = f"One engine takes {size} GPUs, which is no whole number of machines."
            fix = f"Make it at most {split.per_node}, or a multiple of {split.per_node}."
            yield Problem(f"{key}.tensor_parallel_size", message, fix, model.tensor_parallel_size)
    if split.trainer > split.per_node and split.trainer % split.per_node:
        message = (
            f"The trainer gets {split.trainer} GPUs, which is no whole number of machines "
            f"with {split.per_node} each."
        )
        rest = split.trainer % split.per_node
        fix = f"Give the engines {rest} GPUs more, or {split.per_node - rest} fewer."
        yield Problem("cluster.node_num", message, fix, split.nodes)


def _indivisible(config: Config, split: GPUSplit) -> Iterator[Problem]:
    trainer = config.trainer
    shares = ranks_per_row(trainer)
    if split.trainer < 1:
        return
    if split.trainer % shares:
        divisors = [str(n) for n in range(1, split.trainer + 1) if split.trainer % n == 0]
        if trainer.trainer_strategy is TrainerStrategy.MEGATRON:
            key, value = "trainer.megatron", None
            message = (
                f"One copy of the model takes {shares} GPUs (tensor, pipeline and context parallel "
                f"sizes multiplied), and the trainer has {split.trainer}."
            )
            fix = f"Make the product one of {', '.join(divisors)}."
        else:
            key, value = "trainer.ulysses_sequence_parallel_size", shares
            message = f"{shares} GPUs share a sequence, and the trainer has {split.trainer}."
            fix = f"Set it to one of {', '.join(divisors)}."
        yield Problem(key, message, fix, value)
        return
    yield from batch_problems(config, split.trainer // shares)


def ranks_per_row(trainer: TrainerConfig) -> int:
    """GPUs of the trainer that work on the same rows."""
    if trainer.trainer_strategy is not TrainerStrategy.MEGATRON:
        return trainer.ulysses_sequence_parallel_size
    sizes = trainer.megatron
    return (
        sizes.tensor_model_parallel_size
        * sizes.pipeline_model_parallel_size
        * sizes.context_parallel_size
    )


def batch_problems(config: Config, copies: int) -> Iterator[Problem]:
    """With veRL, and with fixed micro-batches, every copy of the model gets as many rows."""
    size = config.buffer.train_batch_size
    exact = config.trainer.trainer_type is TrainerType.VERL or not config.trainer.use_dynamic_bsz
    if not exact or size % copies == 0 or size == 0:
        return
    message = (
        f"{size} experiences a step cannot be split evenly over {copies} ranks of the trainer."
    )
    near = near_batches(size, copies, config.samples_per_task)
    proposals = ", ".join(map(str, near))
    fix = f"Set `buffer.train_batch_size` to one of {proposals}, or change the number of ranks."
    yield Problem("buffer.train_batch_size", message, fix, size)


def near_batches(size: int, copies: int, repeat: int) -> list[int]:
    """The multiples of ``copies`` next to ``size``; whole groups of ``repeat`` come first."""
    whole = math.lcm(copies, repeat)
    near = {(size // step + i) * step for step in (copies, whole) for i in range(-3, 4)}
    ranked = sorted(near, key=lambda n: (n <= 0, n % repeat != 0, abs(n - size), n))
    return sorted(ranked[:3])
