"""TRL's side of `grpo.py`: a few GRPOTrainer steps on one GPU, timed."""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ROWS_A_PASS = 32  # 11k tokens, and the logits of them, which TRL keeps whole


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, sampling included."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self._began)


def distinct_words(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """As benchmarks/plugins/distinct_words.py."""
    texts = [completion[0]["content"].split() for completion in completions]
    return [len(set(words)) / max(1, len(words)) for words in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--sampler", choices=["vllm", "own"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    questions = [json.loads(line)["question"] for line in options.prompts.read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    num_rows = len(rows) // options.steps * options.num_samples
    with_vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.25,
        "vllm_max_model_length": 512,
        "vllm_enable_sleep_mode": False,
    }
    times = StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=distinct_words,
            train_dataset=Dataset.from_list(rows),
            callbacks=[times],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=ROWS_A_PASS,
                gradient_accumulation_steps=num_rows // ROWS_A_PASS,
                num_generations=options.num_samples,
                max_completion_length=options.new_tokens,
                generation_kwargs={"ignore_eos": True} if options.sampler == "vllm" else None,
                max_steps=options.steps,
                learning_rate=1e-6,
                beta=0.0,
                bf16=True,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                model_init_kwargs={"dtype": torch.bfloat16},
                **(with_vllm if options.sampler == "vllm" else {}),
            ),
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    options.out.write_text(json.dumps({"step_seconds": times.step_seconds, "peak_gib": peak}))


if __name__ == "__main__":
    main()
