import pytest
import torch

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import groups, model_folder, multi_turn
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.rank_group import split_rows
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

pytestmark = pytest.mark.slow
GRPO = Objective.from_names(
    "ppo", entropy_loss_fn="default", entropy_loss_fn_args={"entropy_coef": 0.01}
)


def rows(seed: int) -> TrainBatch:
    experiences = [*groups(5, 3, seed=seed), *multi_turn(seed=seed)]
    for experience in experiences[3:6]:
        experience.advantages = torch.zeros(experience.response_length)
    for number, experience in enumerate(experiences[15:]):
        experience.eid.task, experience.eid.run = 99, number
    return TrainBatch.from_experiences(experiences)


async def steps(engine, seeds: range, objective: Objective = GRPO) -> list[dict[str, float]]:
    found = []
    for seed in seeds:
        metrics = await engine.forward_backward(rows(seed), objective)
        found.append(metrics | await engine.optim_step())
    return found


def assert_same(found, wanted, tolerance: float = 1e-6) -> None:
    for step, other in zip(found, wanted, strict=True):
        for name in ("actor/final_loss", "actor/grad_norm", "actor/lr", "actor/ppo_kl"):
            assert step[name] == pytest.approx(other[name], rel=5e-6, abs=tolerance), name


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
async def test_ranks_compute_what_one_process_does(tmp_path, world_size, tied):
    folder = model_folder(tmp_path / "model", tie_word_embeddings=tied)
    given = settings(folder, micro_batches=MicroBatchRule(max_tokens=80))
    single = TorchTrainEngine(given)
    await single.prepare()
    wanted = await steps(single, range(3))
    with rank_group(given, world_size) as group:
        await group.prepare()
        assert_same(await steps(group, range(3)), wanted)
        found = await group.forward(rows(7), "actor", True)
        alone = await single.forward(rows(7), "actor", True)
        for name in ("logprob", "entropy"):
            torch.testing.assert_close(found[name], alone[name], atol=1e-5, rtol=1e-5)
        await group.save(tmp_path / "global_step_3", True)
        await group.wait_saved()
        await group.close()
    weights = load_fsdp_state_dict_from_verl_checkpoint(tmp_path / "global_step_3" / "actor")
    for name, master in single._trained("actor").optimizer.weights.masters.items():
        torch.testing.assert_close(weights[name], master.detach(), atol=1e-6, rtol=1e-6)
    files = {path.name for path in (tmp_path / "global_step_3" / "actor").iterdir()}
    last = world_size - 1
    assert {f"{k}_world_size_{world_size}_rank_{last}.pt" for k in ("model", "optim")} <= files


async def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_with_one(tmp_path):
    folder = model_folder(tmp_path / "model")
    given = settings(folder, micro_batches=MicroBatchRule(max_tokens=80))
    path = tmp_path / "global_step_2"
    with rank_group(given, 4) as group:
        await group.prepare()
        await steps(group, range(2))
        await group.save(path)
        await group.wait_saved()
        wanted = await steps(group, range(2, 4))
    with rank_group(given, 2) as group:
        await group.prepare()
        await group.load(path)
        assert_same(await steps(group, range(2, 4)), wanted)
    single = TorchTrainEngine(given)
    await single.prepare()
    await single.load(path)
    assert_same(await steps(single, range(2, 4)), wanted)


def test_rows_are_split_by_groups_and_balanced():
    batch = rows(0)
    parts = split_rows(batch, 3)
    assert sorted(row for part in parts for row in part) == list(range(len(batch)))
    loads = [int(batch.lengths[part].sum()) for part in parts]
    assert max(loads) < 1.5 * min(loads)
