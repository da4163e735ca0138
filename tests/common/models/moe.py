"""Tiny models with experts, of random weights that route sharply enough to differ."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

VOCAB, EXPERTS, PER_TOKEN = 97, 8, 2
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "num_experts_per_tok": PER_TOKEN,
}


def qwen(**changes: object) -> PretrainedConfig:
    own = {"num_experts": EXPERTS, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeConfig(**{**_SIZES, **own, "norm_topk_prob": True, **changes})


def mixtral() -> PretrainedConfig:
    return MixtralConfig(**_SIZES, num_local_experts=EXPERTS)


def gpt_oss() -> PretrainedConfig:
    return GptOssConfig(**_SIZES, num_local_experts=EXPERTS, head_dim=8)


def deepseek() -> PretrainedConfig:
    """Its routers choose groups of experts first, and its first layer has none."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    latent |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
    experts = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1}
    experts |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
    return DeepseekV3Config(**{**_SIZES, **latent, **experts})


FAMILIES = {"qwen": qwen, "mixtral": mixtral, "gpt_oss": gpt_oss, "deepseek": deepseek}


def model_folder(path: Path, config: PretrainedConfig | None = None) -> str:
    """A folder with random weights."""
    made(config or qwen()).save_pretrained(path)
    return str(path)


def made(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def other_routes(num_tokens: int, num_layers: int, seed: int = 0) -> torch.Tensor:
    """[N, L, K] experts at random, those of a token all different."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_tokens, num_layers, EXPERTS, generator=generator)
    return scores.argsort(-1)[..., :PER_TOKEN].to(torch.int16)
