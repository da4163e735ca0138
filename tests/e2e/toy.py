"""A model, data and rewards so small that a whole run takes seconds. Nothing is downloaded."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "<|user|>", "<|assistant|>", "<|end|>"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Rewards differ between answers of the untrained model, so that every step has a gradient. How a
# reward goes wrong is asked for in `reward_fn_args`.
PLUGIN = """
import os
import time

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn


@REWARD_FUNCTIONS.register_module("toy_reward")
class ToyReward(RewardFn):
    def __init__(self, raises_on="", hangs_on="", waits_on="", waits_for="", seconds=0.0):
        self.raises_on, self.hangs_on, self.seconds = raises_on, hangs_on, seconds
        self.waits_on, self.waits_for = waits_on, waits_for

    def __call__(self, response, prompt):
        if self.raises_on and self.raises_on in prompt:
            raise ValueError("this prompt has no score")
        while self.hangs_on and self.hangs_on in prompt:
            pass
        while self.waits_on and self.waits_on in prompt and not os.path.exists(self.waits_for):
            time.sleep(0.05)
        time.sleep(self.seconds)
        return {"accuracy": sum(c in "0123456789" for c in response) / 10 + len(response) / 100}
"""
LOSS_PLUGIN = """
import time
from pathlib import Path

from trinity.algorithm import POLICY_LOSS_FN
from trinity.algorithm.policy_loss_fn.ppo import PPOPolicyLossFn


@POLICY_LOSS_FN.register_module("toy_slow_loss")
class SlowLoss(PPOPolicyLossFn):
    def __init__(self, seconds, mark):
        super().__init__()
        self.seconds, self.mark = seconds, mark

    def __call__(self, logprob, old_logprob, action_mask, advantages):
        Path(self.mark).touch()
        time.sleep(self.seconds)
        return super().__call__(logprob, old_logprob, action_mask, advantages)
"""
OPERATOR_PLUGIN = """
from trinity.buffer.operators import EXPERIENCE_OPERATORS, ExperienceOperator


@EXPERIENCE_OPERATORS.register_module("toy_judged")
class Judged(ExperienceOperator):
    async def process(self, exps):
        [judge] = self.auxiliary_models["judge"]
        for experience in exps:
            said = [{"role": "user", "content": experience.response_text}]
            reply = await judge.chat.completions.create(
                model="judge", messages=said, max_completion_tokens=2
            )
            experience.info["verdict_tokens"] = reply.usage.completion_tokens
        return exps, {"judged": len({e.info["verdict_tokens"] for e in exps} - {0})}
"""


@dataclass(frozen=True)
class Toy:
    """The folder with everything a run needs."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def plugins(self) -> Path:
        return self.root / "plugins"

    def write(self) -> "Toy":
        _write_model(self.model)
        self.plugins.mkdir()
        (self.plugins / "toy_reward.py").write_text(PLUGIN)
        (self.plugins / "toy_loss.py").write_text(LOSS_PLUGIN)
        (self.plugins / "toy_operator.py").write_text(OPERATOR_PLUGIN)
        for name, count in (("train", 64), ("eval", 4), ("sft", 32)):
            lines = [json.dumps(_row(random.Random(f"{name} {i}"), i)) for i in range(count)]
            (self.root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        return self

    def config(self, folder: Path, **changes: object) -> Path:
        """A configuration file of a synchronous GRPO run below ``folder``.

        Args:
            changes: Values by dotted key, with ``__`` for the dots.
        """
        config = _grpo(self, folder)
        for key, value in changes.items():
            _put(config, key.split("__"), value)
        path = folder / f"{config['name']}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path


def _row(rng: random.Random, index: int) -> dict[str, str]:
    digits = [rng.choice("0123456789") for _ in range(3)]
    return {"question": f"t{index} sort {''.join(digits)}", "answer": "".join(sorted(digits))}


def _write_model(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIALS,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=0,
        bos_token_id=1,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def _grpo(toy: Toy, folder: Path) -> dict[str, Any]:
    columns = {"prompt_key": "question", "response_key": "answer"}
    return {
        "project": "toy",
        "name": "job",
        "mode": "both",
        "checkpoint_root_dir": str(folder / "jobs"),
        "cluster": {"ray_address": "local", "node_num": 1, "gpu_per_node": 0},
        "model": {
            "model_path": str(toy.model),
            "max_prompt_tokens": 24,
            "max_response_tokens": 8,
        },
        "algorithm": {
            "algorithm_type": "grpo",
            "repeat_times": 4,
            "kl_loss_fn": "none",
            "optimizer": {"lr": 1e-2, "lr_scheduler_type": "constant"},
        },
        "buffer": {
            "batch_size": 4,
            "total_steps": 3,
            "explorer_input": {
                "default_workflow_type": "simple_workflow",
                "default_reward_fn_type": "toy_reward",
                "taskset": {"path": str(toy.root / "train.jsonl"), "format": columns},
                "eval_tasksets": [],
            },
        },
        "explorer": {
            "runner_per_model": 8,
            "rollout_model": {"engine_type": "torch", "dtype": "float32"},
        },
        "trainer": {"dtype": "float32"},
        "data_processor": {"experience_pipeline": {"save_input": False}},
    }


def eval_set(toy: Toy) -> list[dict[str, object]]:
    """The `eval_tasksets` of a run that is evaluated, greedily."""
    return [
        {
            "name": "unseen",
            "path": str(toy.root / "eval.jsonl"),
            "format": {"prompt_key": "question", "response_key": "answer"},
            "rollout_args": {"temperature": 0},
        }
    ]


def _put(config: dict[str, Any], path: list[str], value: object) -> None:
    *parents, last = path
    for part in parents:
        config = config.setdefault(part, {})
    if isinstance(value, Mapping) and isinstance(config.get(last), dict):
        config[last] = {**config[last], **value}
    else:
        config[last] = value
