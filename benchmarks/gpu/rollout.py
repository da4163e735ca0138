"""Tokens a second of a rollout through the whole explorer, beside those of bare vLLM.

    python -m benchmarks.gpu.rollout --tokenizer FOLDER

0.5B-shaped model, 512 samples at a time. Ours: tasks through scheduler, runner processes, model
wrapper and engine process, as in a run. Bare: `vllm.LLM.generate` on the same prompts, with the
logprobs that training needs, and without.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.common import model_folder, write

BARE = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    given = json.loads(open(sys.argv[1]).read())
    llm = LLM(given["model"], dtype="bfloat16", max_model_len=given["max_model_len"],
              gpu_memory_utilization=0.8, logprobs_mode="processed_logprobs")
    asked = [{"prompt_token_ids": ids} for ids in given["ids"]]
    found = {}
    for name, logprobs in (("with_logprobs", 0), ("without", None)):
        params = SamplingParams(n=given["samples"], max_tokens=given["new_tokens"],
                                ignore_eos=True, logprobs=logprobs, detokenize=False)
        seconds = []
        for _ in range(given["rounds"] + 1):
            start = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        found[name] = seconds[1:]
    print("FOUND " + json.dumps(found))
"""


def questions(count: int) -> list[str]:
    return [f"Write about a river, a stone and the number {n}. " * 4 for n in range(count)]


def bare(args: argparse.Namespace, model: str) -> dict[str, list[float]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    talks = [[{"role": "user", "content": text}] for text in questions(args.prompts)]
    texts = [
        tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in talks
    ]
    given = {
        "model": model, "ids": [tokenizer.encode(t) for t in texts], "samples": args.samples,
        "new_tokens": args.new_tokens, "rounds": args.rounds, "max_model_len": args.max_model_len,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        script, file = Path(folder, "bare.py"), Path(folder, "given.json")
        script.write_text(BARE)
        file.write_text(json.dumps(given))
        done = subprocess.run([sys.executable, script, file], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return dict(json.loads(line.removeprefix("FOUND ")))
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


def configuration(args: argparse.Namespace, model: str, folder: str) -> Any:
    from trinity.common.config import Config

    return Config.model_validate(
        {
            "project": "benchmark",
            "name": "rollout",
            "mode": "explore",
            "checkpoint_root_dir": folder,
            "cluster": {"node_num": 1, "gpu_per_node": 1},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": args.samples},
            "model": {
                "model_path": model,
                "max_model_len": args.max_model_len,
                "max_response_tokens": args.new_tokens,
            },
            "buffer": {"batch_size": args.prompts},
            "explorer": {
                "runner_per_model": args.prompts,
                "rollout_model": {
                    "engine_type": "vllm",
                    "dtype": "bfloat16",
                    "gpu_memory_utilization": 0.8,
                    "ignore_eos": True,
                    "enable_openai_api": False,
                },
            },
        }
    )


async def through_explorer(args: argparse.Namespace, plan: Any) -> list[float]:
    from trinity.common.workflows import Task
    from trinity.launcher import build_explorer
    from trinity.synchronizer.board import VersionBoard

    buffers = SimpleNamespace(tasks=None, pipeline=None, evals=())
    reporter = SimpleNamespace(report=lambda role, step, metrics: None)
    explorer, _ = build_explorer.build(plan, VersionBoard(), buffers, reporter)  # type: ignore[arg-type]
    await explorer.prepare()
    seconds = []
    for round_ in range(args.rounds + 1):
        tasks = [
            Task(
                workflow="simple_workflow",
                reward_fn="benchmarks.plugins.distinct_words.DistinctWords",
                raw_task={"question": text, "answer": ""},
                repeat_times=args.samples,
                format_args={"prompt_key": "question", "response_key": "answer"},  # type: ignore[arg-type]
            )
            for text in questions(args.prompts)
        ]
        start = time.perf_counter()
        explorer.scheduler.submit(round_, tasks)
        result = await explorer.scheduler.collect(round_)
        seconds.append(time.perf_counter() - start)
        tokens = sum(
            int(e.action_mask.sum()) for e in result.experiences if e.action_mask is not None
        )
        wanted = args.prompts * args.samples * args.new_tokens
        assert tokens == wanted, (tokens, wanted, result.statuses[0].message)
    await explorer.close()
    build_explorer.kill_engines(explorer, [])
    return seconds[1:]


def ours(args: argparse.Namespace, model: str) -> list[float]:
    from trinity.launcher.cluster import ray_cluster
    from trinity.launcher.plan import make_plan

    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(configuration(args, model, folder), found_gpus=1)
        os.environ["TRINITY_LOG_DIR"] = folder
        with ray_cluster("local", plan.namespace, plan.env_vars):
            try:
                return asyncio.run(through_explorer(args, plan))
            except BaseException:
                for log in Path(folder).rglob("*.log"):
                    print(log.name, log.read_text()[-1500:], flush=True)
                raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    model = model_folder("0.5b", args.tokenizer)
    total = args.prompts * args.samples * args.new_tokens
    own = total / statistics.median(ours(args, model))
    print("ours", own, flush=True)
    base = {name: total / statistics.median(found) for name, found in bare(args, model).items()}
    write(
        "gpu_rollout",
        {
            "samples": args.prompts * args.samples,
            "new_tokens": args.new_tokens,
            "explorer_tokens_per_second": own,
            "bare_with_logprobs_tokens_per_second": base["with_logprobs"],
            "bare_without_logprobs_tokens_per_second": base["without"],
            "ratio": own / base["with_logprobs"],
            "ratio_to_without_logprobs": own / base["without"],
        },
    )


if __name__ == "__main__":
    main()
