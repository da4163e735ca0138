"""Forward and backward of the trainer on a CPU, against plain padded batches of the same rows.

    OMP_NUM_THREADS=2 python benchmarks/cpu_train.py --model /path/to/SmolLM2-135M

8 prompts x 8 samples, prompts of 45 tokens, bfloat16, a PPO loss over the answers. These have 32
tokens, or with ``--shortest 4`` any number from 4 to 32, as samples of a model do.
The padded way runs whole sequences through the model, 16 rows at a time, with logits of every
token. Each contender has a process of its own, and its first pass is left out of the times.
Memory is the process's highest resident size. Beside other work on the cores, look at
``times_padded_cpu``, which is by CPU time. The last line printed is the result as JSON.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch.nn.utils.rnn import pad_sequence

from trinity.launcher.plan import KEPT_MEMORY

NUM_PROMPTS, NUM_SAMPLES, PROMPT, ANSWER = 8, 8, 45, 32
ROWS = NUM_PROMPTS * NUM_SAMPLES
PADDED_ROWS = 16
KINDS = ("seconds", "cpu_seconds")


def random_batch(vocabulary: int, shortest: int, seed: int = 0):
    """Groups that share a prompt, their answers random, of ``shortest`` to 32 tokens."""
    from trinity.common.experience import EID, Experience
    from trinity.trainer.batch import TrainBatch

    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (count,), generator=generator)

    rows = []
    for task in range(NUM_PROMPTS):
        prompt = ids(PROMPT)
        for run in range(NUM_SAMPLES):
            answer = int(torch.randint(shortest, ANSWER + 1, (1,), generator=generator))
            rows.append(
                Experience(
                    eid=EID(batch=0, task=task, run=run),
                    tokens=torch.cat([prompt, ids(answer)]),
                    prompt_length=PROMPT,
                    logprobs=torch.full((answer,), -10.0),
                    advantages=torch.randn(1, generator=generator).expand(answer),
                    reward=0.0,
                )
            )
    return TrainBatch.from_experiences(rows)


@dataclass
class Passes:
    """Seconds of each pass: on the clock, and of all cores together."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    @contextmanager
    def timed(self) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu_start)


async def with_trinity(options: argparse.Namespace) -> Passes:
    from trinity.trainer.backends.torch.engine import TorchTrainEngine
    from trinity.trainer.backends.torch.microbatch import MicroBatchRule
    from trinity.trainer.backends.torch.settings import TorchEngineSettings
    from trinity.trainer.loss import Objective

    rule = MicroBatchRule(max_tokens=options.max_tokens)
    settings = TorchEngineSettings(
        options.model, "bfloat16", micro_batches=rule, num_threads=options.threads
    )
    engine = TorchTrainEngine(settings)
    await engine.prepare()
    batch = random_batch(vocabulary_of(options.model), options.shortest)
    found = Passes()
    for _ in range(options.passes):
        with found.timed():
            await engine.forward_backward(batch, Objective.from_names("ppo"))
    await engine.close()
    return found


def padded(options: argparse.Namespace) -> Passes:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    batch = random_batch(vocabulary_of(options.model), options.shortest)
    tokens = pad_sequence([row.long() for row in batch.row_tokens()], batch_first=True)
    attended = torch.arange(tokens.shape[1]) < batch.lengths[:, None]
    old, advantages = batch["old_logprob"], batch["advantages"]  # 0 where there is no token
    num_trained = batch.num_trained_tokens
    found = Passes()
    for _ in range(options.passes):
        with found.timed():
            model.zero_grad(set_to_none=True)
            for rows in torch.arange(ROWS).split(PADDED_ROWS):
                logits = model(tokens[rows], attention_mask=attended[rows].long()).logits
                log_p = logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
                logprob = log_p.gather(2, tokens[rows, PROMPT:, None])[..., 0]
                ratio = (logprob - old[rows]).exp()
                clipped = ratio.clamp(0.8, 1.2) * advantages[rows]
                loss = -torch.minimum(ratio * advantages[rows], clipped).sum() / num_trained
                loss.backward()
    return found


def vocabulary_of(model: str) -> int:
    return int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])


def contend(name: str, options: argparse.Namespace) -> None:
    """Run one contender in this process and print what it took."""
    found = asyncio.run(with_trinity(options)) if name == "trinity" else padded(options)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({**asdict(found), "peak_memory_mb": peak_mb}))


def measure(name: str, options: argparse.Namespace) -> tuple[float, float, float]:
    """Samples a second by clock and by CPU time, and peak memory in MB, in an own process."""
    command = [
        *(sys.executable, __file__, "--model", options.model, "--contender", name),
        *("--passes", str(options.passes), "--threads", str(options.threads)),
        *("--shortest", str(options.shortest)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    if name == "trinity":
        command += ["--max-tokens", str(options.max_tokens)]
        environment |= KEPT_MEMORY  # as engine and trainer have it in a run
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    clock, cpu = (ROWS * (options.passes - 1) / sum(found[k][1:]) for k in KINDS)
    print(f"{name}: {', '.join(f'{s:.2f}' for s in found['seconds'])} s a pass", flush=True)
    return clock, cpu, found["peak_memory_mb"]


def compare(options: argparse.Namespace) -> dict[str, float]:
    """The figures of one round: both sides, one after the other."""
    ours, ours_cpu, ours_mb = measure("trinity", options)
    theirs, theirs_cpu, theirs_mb = measure("padded", options)
    return {
        "trinity_samples_per_second": ours,
        "padded_samples_per_second": theirs,
        "times_padded": ours / theirs,
        "times_padded_cpu": ours_cpu / theirs_cpu,
        "trinity_peak_memory_mb": ours_mb,
        "padded_peak_memory_mb": theirs_mb,
        "memory_of_padded": ours_mb / theirs_mb,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M")
    parser.add_argument("--passes", type=int, default=3, help="passes of each, at least 2")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of both sides in turns; figures are their medians"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--shortest", type=int, default=ANSWER, help="tokens of an answer, at least"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=640, help="packed tokens of one of our micro-batches"
    )
    parser.add_argument("--contender", choices=["trinity", "padded"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        contend(options.contender, options)
        return
    figures = [compare(options) for _ in range(options.rounds)]
    print(json.dumps({name: round(median(f[name] for f in figures), 3) for name in figures[0]}))


if __name__ == "__main__":
    main()
