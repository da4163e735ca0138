"""Make this example's folder: the quickstart's tasks and tokenizer, and a model with experts.

python examples/router_replay/prepare.py [--folder FOLDER]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoConfig, Qwen3MoeConfig

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=HERE)
    folder = parser.parse_args().folder
    script = HERE.parent / "quickstart" / "prepare.py"
    subprocess.run([sys.executable, script, "--folder", folder], check=True)
    dense = AutoConfig.from_pretrained(folder / "model")
    Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=dense.bos_token_id,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        architectures=["Qwen3MoeForCausalLM"],
    ).save_pretrained(folder / "model")


if __name__ == "__main__":
    main()
