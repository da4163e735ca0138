"""Bare vLLM's side of `rollout.py`: `vllm.LLM.generate` on the prompts of a file, timed."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from benchmarks.gpu.turns import turn, wait_for_all

# Name, logprobs, and whether they come as flat lists instead of dictionaries.
KINDS = (
    ("with_logprobs", 0, False),
    ("with_flat_logprobs", 0, True),
    ("without", None, False),
)


def main() -> None:
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        given["model"],
        dtype="bfloat16",
        max_model_len=given["max_model_len"],
        gpu_memory_utilization=given["share"],
        kv_cache_memory_bytes=given["cache_bytes"],
        logprobs_mode="processed_logprobs",
    )
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in given["ids"]]
    kinds = [kind for kind in KINDS if kind[0] in given["kinds"]]
    found: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
    wait_for_all(given["name"])
    for round_ in range(given["rounds"] + 1):
        for name, logprobs, is_flat in kinds:
            params = SamplingParams(
                n=given["samples"],
                max_tokens=given["new_tokens"],
                ignore_eos=True,
                logprobs=logprobs,
                flat_logprobs=is_flat,
                detokenize=False,
            )
            with turn():
                start = time.perf_counter()
                llm.generate(asked, params, use_tqdm=False)
                seconds = time.perf_counter() - start
            print(f"round {round_}: {name} {seconds:.3f} s", flush=True)
            if round_:
                found[name].append(seconds)
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
