"""TRL's side of `cpu_grpo.py`: a few GRPOTrainer steps, timed. Runs in an interpreter with trl."""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, sampling included, and from process start to the first."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.seconds_to_first_step = 0.0
        self._began = 0.0

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._began = _now()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.step_seconds.append(_now() - self._began)
        if len(self.step_seconds) == 1:
            self.seconds_to_first_step = time.time() - psutil.Process().create_time()


def _now() -> float:
    """Once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def distinct_words(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """As benchmarks/plugins/distinct_words.py."""
    texts = [completion[0]["content"].split() for completion in completions]
    return [len(set(words)) / max(1, len(words)) for words in texts]


def arguments(description: str) -> argparse.ArgumentParser:
    """What both benchmarks give to TRL's side."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--num-samples", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser


def train(options: argparse.Namespace, rows_a_pass: int | None = None, **more: Any) -> StepTimes:
    """Train on all prompts, ``rows_a_pass`` samples at a time (None: all of a step)."""
    questions = [json.loads(line)["question"] for line in options.prompts.read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    num_rows = len(rows) // options.steps * options.num_samples
    at_once = rows_a_pass or num_rows
    times = StepTimes()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=options.model,
            reward_funcs=distinct_words,
            train_dataset=Dataset.from_list(rows),
            callbacks=[times],
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=at_once,
                gradient_accumulation_steps=num_rows // at_once,
                num_generations=options.num_samples,
                max_completion_length=options.new_tokens,
                max_steps=options.steps,
                learning_rate=1e-6,
                beta=0.0,
                bf16=True,
                gradient_checkpointing=False,
                shuffle_dataset=False,
                save_strategy="no",
                report_to=[],
                model_init_kwargs={"dtype": torch.bfloat16},
                **more,
            ),
        )
        trainer.train()
    return times


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    times = train(options, use_cpu=True)
    found = {
        "step_seconds": times.step_seconds,
        "seconds_to_first_step": times.seconds_to_first_step,
    }
    options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
