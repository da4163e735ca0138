"""Tokens a second of a rollout through the whole explorer, beside those of bare vLLM.

    python -m benchmarks.gpu.rollout --tokenizer FOLDER

0.5B-shaped model, 512 samples at a time for each engine. Ours: tasks through scheduler, runner
processes, model wrapper and engine process, as in a run, with one engine and (``--engines 2``) with
two. Bare: `vllm.LLM.generate` on the same prompts, with the logprobs that training needs, as
dictionaries and as flat lists, and without; as vLLM runs this model by itself (``bare``), and with
the model runner that our engine chooses (``bare_v2``). All start side by side on the first GPUs,
and are measured in turns, round by round. `--part engine` is our engine alone, in this process, and
a profile of it in the results' folder.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.common import RESULTS, model_folder, visible_gpus, write
from benchmarks.gpu.turns import COUNT, FOLDER, my_turn

BARE = ("bare", "bare_v2")
KINDS = ("with_logprobs", "with_flat_logprobs", "without")

_CACHE_BYTES = 8 * 2**30  # of keys and values, of each engine
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


def questions(count: int) -> list[str]:
    return [f"Write about a river, a stone and the number {n}. " * 4 for n in range(count)]


def prompts_of(args: argparse.Namespace) -> int:
    return int(args.prompts * args.engines)


def prompt_ids(args: argparse.Namespace, model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    talks = [[{"role": "user", "content": text}] for text in questions(args.prompts)]
    texts = [
        tokenizer.apply_chat_template(t, tokenize=False, add_generation_prompt=True) for t in talks
    ]
    return [tokenizer.encode(text) for text in texts]


def bare(args: argparse.Namespace, model: str) -> dict[str, list[float]]:
    given = {
        "model": model, "ids": prompt_ids(args, model), "samples": args.samples,
        "new_tokens": args.new_tokens, "rounds": args.rounds, "max_model_len": args.max_model_len,
        "share": args.share, "cache_bytes": _CACHE_BYTES, "name": args.part,
        "kinds": args.kinds,
    }  # fmt: skip
    environment = os.environ | ({_RUNNER: "1"} if args.part == "bare_v2" else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "given.json")
        file.write_text(json.dumps(given))
        command = [sys.executable, "-m", "benchmarks.gpu.rollout_bare", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("round")))
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            return dict(json.loads(line.removeprefix("FOUND ")))
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


async def engine_alone(args: argparse.Namespace, model: str) -> list[float]:
    """Seconds of each round, and the profile of one more."""
    from trinity.common.models.protocol import SamplingParams
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.settings import VLLMEngineSettings

    engine = VLLMEngine(
        VLLMEngineSettings(
            model,
            max_model_len=args.max_model_len,
            gpu_memory_utilization=args.share,
            kv_cache_bytes=_CACHE_BYTES,
            keeps_seeds=False,
        )
    )
    await engine.prepare()
    asked = SamplingParams(n=args.samples, max_tokens=args.new_tokens, ignore_eos=True)
    prompts, seconds, profile = prompt_ids(args, model), [], cProfile.Profile()
    for round_ in range(args.rounds + 2):
        if round_ > args.rounds:
            profile.enable()
        start = time.perf_counter()
        await asyncio.gather(*(engine.sample(ids, asked) for ids in prompts))
        seconds.append(time.perf_counter() - start)
    profile.disable()
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "rollout_profile.txt").open("w") as file:
        file.write(f"{seconds}\n")
        pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)
    await engine.close()
    return seconds[1:-1]


def configuration(args: argparse.Namespace, model: str, folder: str) -> Any:
    from trinity.common.config import Config

    return Config.model_validate(
        {
            "project": "benchmark",
            "name": "rollout",
            "mode": "explore",
            "checkpoint_root_dir": folder,
            "cluster": {"node_num": 1, "gpu_per_node": args.engines},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": args.samples},
            "model": {
                "model_path": model,
                "max_model_len": args.max_model_len,
                "max_response_tokens": args.new_tokens,
            },
            "buffer": {"batch_size": prompts_of(args)},
            "explorer": {
                "runner_per_model": args.prompts,
                "rollout_model": {
                    "engine_type": "vllm",
                    "engine_num": args.engines,
                    "dtype": "bfloat16",
                    "gpu_memory_utilization": args.share,
                    "extra_engine_args": {"kv_cache_memory_bytes": _CACHE_BYTES},
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
    name, seconds = f"ours_{len(explorer.engines)}", []
    for round_ in range(args.rounds + 1):
        tasks = [
            Task(
                workflow="simple_workflow",
                reward_fn="benchmarks.plugins.distinct_words.DistinctWords",
                raw_task={"question": text, "answer": ""},
                repeat_times=args.samples,
                format_args={"prompt_key": "question", "response_key": "answer"},  # type: ignore[arg-type]
            )
            for text in questions(prompts_of(args))
        ]
        async with my_turn(name):
            start = time.perf_counter()
            explorer.scheduler.submit(round_, tasks)
            result = await explorer.scheduler.collect(round_)
            seconds.append(time.perf_counter() - start)
        runs = [float(e.metrics["time/run_execution"]) for e in result.experiences]
        print(f"round {round_}: {seconds[-1]:.3f} s, longest run {max(runs):.3f} s", flush=True)
        tokens = sum(
            int(e.action_mask.sum()) for e in result.experiences if e.action_mask is not None
        )
        wanted = prompts_of(args) * args.samples * args.new_tokens
        assert tokens == wanted, (tokens, wanted, result.statuses[0].message)
    await explorer.close()
    build_explorer.kill_engines(explorer, [])
    return seconds[1:]


def ours(args: argparse.Namespace, model: str) -> list[float]:
    from trinity.launcher.cluster import ray_cluster
    from trinity.launcher.plan import make_plan

    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(configuration(args, model, folder), found_gpus=args.engines)
        os.environ["TRINITY_LOG_DIR"] = folder
        with ray_cluster("local", plan.namespace, plan.env_vars):
            try:
                return asyncio.run(through_explorer(args, plan))
            except BaseException:
                for log in Path(folder).rglob("*.log"):
                    print(log.name, log.read_text()[-1500:], flush=True)
                raise


def measure_part(args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of one of the parts, in this process."""
    model = model_folder("0.5b", args.tokenizer)
    total = args.prompts * args.samples * args.new_tokens
    if args.part in BARE:
        found = bare(args, model)
        return {name: total / statistics.median(seconds) for name, seconds in found.items()}
    if args.part == "engine":
        seconds = asyncio.run(engine_alone(args, model))
        return {"tokens_per_second": total / statistics.median(seconds)}
    return {"tokens_per_second": total * args.engines / statistics.median(ours(args, model))}


def start_part(part: str, engines: int, gpus: list[str], more: list[str]) -> subprocess.Popen[str]:
    """The same program for one part, on its GPUs."""
    command = [sys.executable, "-m", "benchmarks.gpu.rollout", *sys.argv[1:], "--part", part]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    command += ["--engines", str(engines), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def result_of(process: subprocess.Popen[str]) -> dict[str, float]:
    """What a part printed last; empty if it failed."""
    output, _ = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("PART ")]
    if process.returncode or not lines:
        print(output[-4000:], flush=True)
        return {}
    rounds = [line for line in output.splitlines() if line.startswith("round ")]
    print("\n".join([*rounds, lines[-1]]), flush=True)
    return dict(json.loads(lines[-1].removeprefix("PART ")))


def all_parts(args: argparse.Namespace, gpus: list[str]) -> dict[str, dict[str, float]]:
    """What each part found, by its name and its number of engines; all share the first GPUs."""
    wanted = [(part, 1) for part in args.parts]
    wanted += [("ours", args.engines)] if args.engines > 1 else []
    share = ["--share", str(args.share / len(wanted))]
    with tempfile.TemporaryDirectory() as made, ThreadPoolExecutor(len(wanted)) as pool:
        folder = os.environ.get(FOLDER, made)
        os.environ[FOLDER] = folder
        os.environ.setdefault(COUNT, str(len(wanted)))

        def measured(part: str, engines: int) -> dict[str, float]:
            found = result_of(start_part(part, engines, gpus[:engines], share))
            Path(folder, f"{part}_{engines}.ended.ready").touch()  # nobody waits for a failed one
            return found

        results = pool.map(lambda one: measured(*one), wanted)
        return {
            f"{part}_{engines}": found
            for (part, engines), found in zip(wanted, results, strict=True)
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64, help="for each engine")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.8, help="of a GPU's memory, of all parts")
    parser.add_argument("--parts", nargs="+", choices=["ours", *BARE], default=["ours", *BARE])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of bare vLLM")
    parser.add_argument("--part", choices=["ours", *BARE, "engine"], help="only this, printed")
    args = parser.parse_args()
    if args.part:
        print("PART " + json.dumps(measure_part(args)), flush=True)
        return
    model_folder("0.5b", args.tokenizer)
    found = all_parts(args, visible_gpus())
    own = found.get("ours_1", {}).get("tokens_per_second")
    result: dict[str, object] = {
        "samples": args.prompts * args.samples,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "gpus": len(visible_gpus()),
        "explorer_tokens_per_second": own,
    }
    for part in BARE:
        for kind, rate in found.get(f"{part}_1", {}).items():
            result[f"{part}_{kind}_tokens_per_second"] = rate
            if own:
                result[f"ratio_to_{part}_{kind}"] = own / rate
    more = found.get(f"ours_{args.engines}", {}).get("tokens_per_second")
    if own and more and args.engines > 1:
        result |= {f"{args.engines}_engines_tokens_per_second": more, "scaling": more / own}
    write("gpu_rollout" if "bare" in args.parts else "gpu_rollout_scaling", result)


if __name__ == "__main__":
    main()
