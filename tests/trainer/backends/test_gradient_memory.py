"""Which gradients lie beside the activations of a pass: what the estimate of memory rests on."""

import torch

from tests.trainer.toy import groups, model_folder
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective


class Watching:
    """An objective that notes, at the output layer of each pass, which weights have a gradient."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []
        self.masters = {}
        self._own = Objective.from_names("ppo", {"clip_range": 0.2})

    def __getattr__(self, name):
        return getattr(self._own, name)

    def __call__(self, outputs, batch):
        self.seen.append({name for name, m in self.masters.items() if m.grad is not None})
        return self._own(outputs, batch)


async def seen_in(tmp_path, max_tokens):
    torch.manual_seed(0)
    rule = MicroBatchRule(max_tokens=max_tokens)
    folder = model_folder(tmp_path / "model")
    engine = TorchTrainEngine(TorchEngineSettings(folder, dtype="float32", micro_batches=rule))
    await engine.prepare()
    objective = Watching()
    objective.masters = engine._trained("actor").optimizer.weights.masters
    await engine.forward_backward(TrainBatch.from_experiences(groups(2, 2)), objective)
    every = set(objective.masters)
    await engine.optim_step()
    left = {name for name, master in objective.masters.items() if master.grad is not None}
    await engine.close()
    return objective.seen, every, left


async def test_gradients_of_one_pass_come_as_its_activations_go(tmp_path):
    seen, _, left = await seen_in(tmp_path, None)
    assert len(seen) == 1
    assert all("layers" not in name for name in seen[0])
    assert not left


async def test_gradients_of_the_first_pass_are_there_in_the_next(tmp_path):
    seen, every, _ = await seen_in(tmp_path, 30)
    assert len(seen) > 1
    assert seen[-1] == every
