"""Samples a second of the torch engine against Hugging Face `generate`, and the wrapper's cost.

    python benchmarks/rollout.py --model /work/models/smollm2-135m

All contenders sample the same prompts with the same lengths in the same process, in turns. With
``--vllm-python`` vLLM takes part too, in that interpreter. The last line printed is the result
as JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# As in a run: threads that wait for each other spin shortly, then sleep. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch

from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.common.models.fake import FakeEngine
from trinity.common.models.loading import load_causal_lm, load_tokenizer
from trinity.engine.torch import TorchEngine, TorchEngineSettings

TOPICS = ("river", "stone", "garden", "winter", "engine", "letter", "market", "shadow")


def prompts(model: str, count: int) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    talks = [
        [{"role": "user", "content": f'Write a short sentence with the word "{word}" ({n}).'}]
        for n, word in zip(range(count), TOPICS * (count // len(TOPICS) + 1), strict=False)
    ]
    return [
        tokenizer.encode(
            tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        )
        for talk in talks
    ]


async def with_torch(args: argparse.Namespace, ids: list[list[int]]) -> list[float]:
    engine = TorchEngine(
        TorchEngineSettings(args.model, dtype=args.dtype, num_threads=args.threads)
    )
    await engine.prepare()
    seconds = []
    for round_ in range(args.rounds + 1):
        start = time.perf_counter()
        await asyncio.gather(
            *[
                engine.sample(
                    prompt,
                    SamplingParams(
                        n=args.samples, max_tokens=args.new_tokens, ignore_eos=True, seed=round_
                    ),
                )
                for prompt in ids
            ]
        )
        seconds.append(time.perf_counter() - start)
    await engine.close()
    return seconds[1:]


def with_generate(args: argparse.Namespace, ids: list[list[int]]) -> list[float]:
    torch.set_num_threads(args.threads)
    model, _ = load_causal_lm(args.model, args.dtype, attn_implementation="sdpa")
    rows = [prompt for prompt in ids for _ in range(args.samples)]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    seconds = []
    for _ in range(args.rounds + 1):
        start = time.perf_counter()
        model.generate(
            padded,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=args.new_tokens,
            max_new_tokens=args.new_tokens,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    given = json.loads(open(sys.argv[1]).read())
    llm = LLM(given["model"], dtype=given["dtype"], max_model_len=1024, **given["limits"])
    params = SamplingParams(n=given["samples"], max_tokens=given["new_tokens"], ignore_eos=True)
    asked = [{"prompt_token_ids": ids} for ids in given["ids"]]
    seconds = []
    for _ in range(given["rounds"] + 1):
        start = time.perf_counter()
        llm.generate(asked, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    print("SECONDS " + json.dumps(seconds[1:]))
"""


def with_vllm(args: argparse.Namespace, ids: list[list[int]]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        script, given = Path(folder, "run.py"), Path(folder, "given.json")
        script.write_text(VLLM)
        # A CPU's memory is shared with the rest of the machine; a GPU is vLLM's own.
        is_shared = not torch.cuda.is_available()
        limits = (
            {"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.1} if is_shared else {}
        )
        names = ("model", "dtype", "samples", "new_tokens", "rounds")
        given.write_text(
            json.dumps({n: getattr(args, n) for n in names} | {"ids": ids, "limits": limits})
        )
        found = subprocess.run(
            [args.vllm_python, str(script), str(given)],
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # vLLM ends its whole process group
        )
    lines = [line for line in found.stdout.splitlines() if line.startswith("SECONDS ")]
    if not lines:
        sys.exit(f"vLLM gave no result:\n{found.stderr[-3000:]}")
    return list(json.loads(lines[0].removeprefix("SECONDS ")))


async def wrapper_ms_per_sample(args: argparse.Namespace, ids: list[list[int]]) -> float:
    """What ModelWrapper adds to a sample: chat over an engine that takes no time."""
    reply = list(range(100, 100 + args.new_tokens))
    count = 40 * args.samples
    model = ModelWrapper(FakeEngine([reply] * (2 * count)), ModelSettings(args.model))
    talk = [{"role": "user", "content": "Write a short sentence about a river."}]
    await model.chat_async(talk, n=args.samples)
    start = time.perf_counter()
    for _ in range(40):
        model.begin_run(0)
        await model.chat_async(talk, n=args.samples)
    return (time.perf_counter() - start) / count * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vllm-python", help="interpreter that has vLLM")
    args = parser.parse_args()
    ids = prompts(args.model, args.prompts)
    seconds = {
        "torch": asyncio.run(with_torch(args, ids)),
        "generate": with_generate(args, ids),
    }
    if args.vllm_python:
        seconds["vllm"] = with_vllm(args, ids)
    num_samples = args.prompts * args.samples
    best = {name: num_samples / min(values) for name, values in seconds.items()}
    result = {
        "benchmark": "rollout",
        "samples_per_s": {name: round(value, 2) for name, value in best.items()},
        "tokens_per_s": {name: round(v * args.new_tokens, 1) for name, v in best.items()},
        "torch_over": {
            name: round(best["torch"] / value, 2) for name, value in best.items() if name != "torch"
        },
        "wrapper_ms_per_sample": round(asyncio.run(wrapper_ms_per_sample(args, ids)), 3),
        "threads": args.threads,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
