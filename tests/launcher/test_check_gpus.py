"""Which ways from trainer to engine a plan's GPUs allow."""

import pytest

from tests.trainer.toy import tiny_config
from trinity.common.config import Config
from trinity.common.errors import Problem
from trinity.launcher.check_gpus import gpu_problems
from trinity.launcher.plan import RunPlan, make_plan


@pytest.fixture
def plan_of(tmp_path):
    def make(found_gpus: int, **sections: object) -> RunPlan:
        tiny_config().save_pretrained(tmp_path / "model")
        given = {
            "checkpoint_root_dir": str(tmp_path),
            "model": {"model_path": str(tmp_path / "model"), "max_model_len": 64},
            "cluster": {"node_num": 1, "gpu_per_node": found_gpus},
            "explorer": {"rollout_model": {"engine_type": "vllm"}},
            **sections,
        }
        return make_plan(Config.model_validate(given), found_gpus=found_gpus)

    return make


def keys(plan: RunPlan) -> list[str]:
    found: list[Problem] = list(gpu_problems(plan))
    return [problem.key for problem in found]


def engine(**changes: object) -> dict[str, object]:
    return {"rollout_model": {"engine_type": "vllm", **changes}}


def test_nccl_between_a_trainer_and_engines_is_fine(plan_of):
    plan = plan_of(4, explorer=engine(engine_num=2))
    assert plan.config.synchronizer.sync_method == "nccl"
    assert (plan.gpus.explorer, plan.gpus.trainer) == (2, 2)
    assert keys(plan) == []


@pytest.mark.parametrize(
    ("gpus", "sections", "key"),
    [
        (2, {"explorer": engine(engine_type="torch")}, "synchronizer.sync_method"),
        (0, {"explorer": engine(engine_type="torch")}, "synchronizer.sync_method"),
        (
            3,
            {"explorer": engine(data_parallel_size=2)},
            "explorer.rollout_model.data_parallel_size",
        ),
    ],
)
def test_where_nccl_can_not_go(plan_of, gpus, sections, key):
    assert keys(plan_of(gpus, synchronizer={"sync_method": "nccl"}, **sections)) == [key]


def test_one_gpu_is_shared(plan_of):
    plan = plan_of(1, mode="colocate")
    assert keys(plan) == [] and plan.is_colocated and plan.gpus.trainer == 0
    assert plan.env_on(0, 1)["CUDA_VISIBLE_DEVICES"]


def test_each_engine_shares_its_gpus_with_trainer_ranks(plan_of, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shared = {"cluster": {"gpu_per_node": 4}}
    plan = plan_of(
        4, mode="colocate", explorer=engine(engine_num=2, tensor_parallel_size=2), **shared
    )
    assert keys(plan) == [] and plan.num_ranks == 4
    assert plan.env_on(2, 2)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert plan.env_on(3, 1)["CUDA_VISIBLE_DEVICES"] == "7"


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"explorer": engine(engine_type="torch")}, "explorer.rollout_model.engine_type"),
        ({"synchronizer": {"sync_offset": 1}}, "synchronizer.sync_style"),
        ({"synchronizer": {"sync_method": "checkpoint"}}, "synchronizer.sync_method"),
        ({"cluster": {"node_num": 1, "gpu_per_node": 2}}, "explorer.rollout_model.engine_num"),
        ({"cluster": {"node_num": 2, "gpu_per_node": 1}}, "cluster.node_num"),
        ({"synchronizer": {"delta": True}}, "synchronizer.delta"),
    ],
)
def test_what_sharing_gpus_excludes(plan_of, sections, key):
    assert key in keys(plan_of(2, mode="colocate", **{"cluster": {"gpu_per_node": 1}, **sections}))
