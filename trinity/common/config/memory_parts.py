"""What estimates of memory are made of, and tokens that a pass holds."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.common.config.derive_trainer import sequence_shares
from trinity.common.config.root import Config
from trinity.common.config.training import PartSettings

CONTEXT = 600 * 2**20
"""Bytes that CUDA and libraries take of a GPU."""


@dataclass(frozen=True)
class Part:
    """One thing that takes memory on a GPU."""

    name: str
    bytes: float
    how: str


def micro_batch_tokens(config: Config, settings: PartSettings) -> int:
    """Most tokens one pass with gradients holds on one GPU."""
    shares = sequence_shares(config.trainer)
    longest = config.model.max_model_len or 0
    if settings.train.max_tokens is None:
        return (settings.train.max_rows or 1) * longest // shares
    held = max(settings.train.max_tokens, -(-longest // shares))
    return min(held, batch_tokens(config) or held)


def batch_tokens(config: Config) -> int:
    """Most tokens of a whole training step; 0 if its rows have no bound."""
    rows, longest = config.buffer.train_batch_size, config.model.max_model_len or 0
    prompt = config.model.max_prompt_tokens or 0
    if not config.trainer.enable_shared_prefix or not prompt < longest:
        return rows * longest
    prompts = -(-rows // config.samples_per_task)
    return rows * (longest - prompt) + prompts * prompt
