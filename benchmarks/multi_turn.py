"""What a conversation costs beside its generation: templates, tokens, history, the experience.

    python benchmarks/multi_turn.py --model /work/models/smollm2-135m

Conversations of ``--turns`` replies are sampled by the torch engine; then the same replies are
played back by an engine that takes no time, so that what is left is bookkeeping. The last line
printed is the result as JSON; ``share`` must stay below 0.05.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence

# As in a run: threads that wait for each other spin shortly, then sleep. Before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.common.models.fake import FakeEngine
from trinity.common.models.loading import load_tokenizer
from trinity.common.models.protocol import Completion
from trinity.common.workflows import Task
from trinity.engine.torch import TorchEngine, TorchEngineSettings
from trinity.explorer.runner import RunnerSettings, WorkflowRunner
from trinity.explorer.units import Unit
from trinity.workflows.envs.base import EnvWorkflow, Outcome

_Replies = dict[tuple[tuple[int, ...], int | None], list[Completion]]


class Echo(EnvWorkflow):
    """Answers every reply with the number of the turn, and never ends by itself."""

    def begin(self) -> list[dict[str, str]]:
        self._turn = 0
        return [{"role": "user", "content": f"Let us count. {self.task.raw_task['start']}"}]

    def act(self, reply: str) -> Outcome:
        self._turn += 1
        return Outcome(f"Turn {self._turn}: what comes next?", reward=0.01)


class Recorder:
    """An engine that keeps what another one gave."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self.replies: _Replies = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        found = await self._engine.sample(prompt_ids, params)
        self.replies[tuple(prompt_ids), params.seed] = found
        return found


class Player(FakeEngine):
    """Gives the kept replies at once."""

    def __init__(self, replies: _Replies) -> None:
        super().__init__([])
        self._kept = replies

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, adapter: str | None = None
    ) -> list[Completion]:
        return self._kept[tuple(prompt_ids), params.seed]


async def seconds_of(model: ModelWrapper, args: argparse.Namespace) -> float:
    """Wall time of all conversations, each of which must have every turn."""
    runner = WorkflowRunner(0, model, [], RunnerSettings())
    await runner.prepare()
    arguments = {"max_turns": args.turns}
    units = [
        Unit(i, Task(Echo, raw_task={"start": i}, workflow_args=arguments), (0,), i, 3600.0)
        for i in range(args.runs)
    ]
    start = time.perf_counter()
    results = await asyncio.gather(*map(runner.run_unit, units))
    seconds = time.perf_counter() - start
    await runner.close()
    for result in results:
        assert not result.runs[0].error, result.runs[0].error
        assert result.runs[0].metrics[0]["env_steps"] == args.turns
    return seconds


async def measure(args: argparse.Namespace) -> dict[str, float]:
    settings = ModelSettings(
        args.model, max_model_len=args.turns * (args.new_tokens + 40) + 64,
        max_response_tokens=args.new_tokens, ignore_eos=True,
    )  # fmt: skip
    tokenizer = load_tokenizer(args.model)
    engine = TorchEngine(
        TorchEngineSettings(args.model, dtype=args.dtype, num_threads=args.threads)
    )
    await engine.prepare()
    recorder = Recorder(engine)
    generation = await seconds_of(ModelWrapper(recorder, settings, tokenizer), args)  # type: ignore[arg-type]  # passes all on
    await engine.close()
    player = Player(recorder.replies)
    rounds = [await seconds_of(ModelWrapper(player, settings, tokenizer), args) for _ in range(3)]
    bookkeeping = min(rounds)
    share = bookkeeping / (generation - bookkeeping)
    return {
        "generation_s": round(generation - bookkeeping, 3),
        "bookkeeping_s": round(bookkeeping, 3),
        "share": round(share, 4),
        "ms_a_turn": round(1000 * bookkeeping / (args.turns * args.runs), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="examples/demo_llm/model")
    parser.add_argument("--turns", type=int, default=64)
    parser.add_argument("--runs", type=int, default=4, help="Conversations side by side.")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
