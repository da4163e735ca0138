"""Tiny models and random experiences, for tests of the trainer."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from trinity.common.experience import EID, Experience

VOCAB = 97


def tiny_config(**changes: object) -> LlamaConfig:
    settings: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**settings, **changes})


def model_folder(path: Path, **changes: object) -> str:
    """A folder with a config and no weights: the engine makes them up from its seed."""
    tiny_config(**changes).save_pretrained(path)
    return str(path)


def plain_model(folder: str, seed: int = 42) -> PreTrainedModel:
    """What the engine's model is at first, by plain transformers."""
    config = LlamaConfig.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def groups(
    num_groups: int = 3, size: int = 4, seed: int = 0, prompt: int = 24, response: int = 12
) -> list[Experience]:
    """Samples of some prompts, of different lengths, with logprobs and advantages."""
    generator = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    experiences = []
    for task in range(num_groups):
        prompt_ids = ints(3, VOCAB, int(ints(prompt // 2, prompt + 1, 1)))
        for run in range(size):
            length = int(ints(1, response + 1, 1))
            experiences.append(
                Experience(
                    eid=EID(batch=0, task=task, run=run),
                    tokens=torch.cat([prompt_ids, ints(3, VOCAB, length)]),
                    prompt_length=len(prompt_ids),
                    logprobs=-4 - torch.rand(length, generator=generator),
                    advantages=torch.randn(1, generator=generator).expand(length),
                    reward=float(run),
                )
            )
    return experiences


def multi_turn(num_rows: int = 3, seed: int = 1) -> list[Experience]:
    """Rows with gaps in their action mask."""
    rows = groups(1, num_rows, seed, response=30)
    for row in rows:
        assert row.action_mask is not None
        row.action_mask[2:5] = False
        row.action_mask[11:20] = False
    return rows
