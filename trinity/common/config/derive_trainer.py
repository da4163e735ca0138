"""Open values of `trainer:`."""

from __future__ import annotations

from trinity.common.config.algorithm_table import AlgorithmSpec
from trinity.common.config.fill import Filler
from trinity.common.config.trainer import TrainerConfig
from trinity.common.constants import TrainerStrategy


def derive_trainer(filler: Filler, spec: AlgorithmSpec) -> None:
    """Fill in the token limit of a micro-batch and the end of training on a data set."""
    config = filler.config
    if not config.mode.trains:
        return
    own, other = "trainer.grad_clip", "algorithm.optimizer.clip_grad"
    if filler.is_set(other) and not filler.is_set(own):
        filler.put(own, config.algorithm.optimizer.clip_grad, f"as {other}")
    if spec.schema != "experience":
        filler.default("trainer.total_steps", config.buffer.total_steps, "as buffer.total_steps")
    longest = config.model.max_model_len
    if longest is None:
        return
    shares = sequence_shares(filler.config.trainer)
    why = f"twice the longest sequence, {longest} tokens"
    if shares > 1:
        why += f", over {shares} GPUs"
    filler.default("trainer.max_token_len_per_gpu", -(-2 * longest // shares), why)


def sequence_shares(trainer: TrainerConfig) -> int:
    """GPUs that share one sequence."""
    if trainer.trainer_strategy is TrainerStrategy.MEGATRON:
        return trainer.megatron.context_parallel_size
    return trainer.ulysses_sequence_parallel_size
