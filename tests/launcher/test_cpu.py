from pathlib import Path

import pytest

from trinity.common.config import Config, MegatronConfig, load_config
from trinity.common.constants import TrainerStrategy
from trinity.launcher.cpu import Replacement, for_cpu

GPU_RUN = """
mode: colocate
model: {model_path: /m}
cluster: {node_num: 2, gpu_per_node: 8}
explorer:
  rollout_model: {engine_type: vllm, engine_num: 4, tensor_parallel_size: 2}
  auxiliary_models: [{model_path: /judge, engine_type: vllm}]
trainer: {trainer_type: verl, ulysses_sequence_parallel_size: 2}
synchronizer: {sync_method: nccl}
algorithm: {algorithm_type: grpo, repeat_times: 8}
"""


@pytest.fixture(autouse=True)
def processor(monkeypatch) -> dict[str, bool]:
    """What it can do; tests change it."""
    found = {"has_bfloat16": True}
    monkeypatch.setattr("trinity.launcher.cpu.has_bfloat16", lambda: found["has_bfloat16"])
    return found


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run.yaml").write_text(GPU_RUN)
    return load_config(tmp_path / "run.yaml")


def test_what_needs_gpus_is_replaced_and_told(config: Config) -> None:
    before = config.model_copy(deep=True)
    fitted, changes = for_cpu(config)
    assert config == before
    told = {change.key: (change.before, change.after) for change in changes}
    assert told == {
        "mode": ("colocate", "both"),
        "cluster.node_num": (2, 1),
        "cluster.gpu_per_node": (8, 0),
        "explorer.rollout_model.engine_type": ("vllm", "torch"),
        "explorer.rollout_model.tensor_parallel_size": (2, 1),
        "explorer.auxiliary_models[0].engine_type": ("vllm", "torch"),
        "trainer.trainer_type": ("verl", "torch"),
        "trainer.ulysses_sequence_parallel_size": (2, 1),
        "synchronizer.sync_method": ("nccl", "memory"),
    }
    assert fitted.algorithm == config.algorithm and fitted.model == config.model
    assert fitted.explorer.rollout_model.engine_num == 4


def test_without_instructions_for_bfloat16_all_is_float32(
    config: Config, processor: dict[str, bool]
) -> None:
    processor["has_bfloat16"] = False
    fitted, changes = for_cpu(config)
    told = {change.key for change in changes if change.after == "float32"}
    sections = ("trainer", "explorer.rollout_model", "explorer.auxiliary_models[0]")
    assert told == {f"{section}.dtype" for section in sections}
    assert for_cpu(fitted) == (fitted, [])
    config.trainer.dtype = "bfloat16"  # the user wants it all the same
    fitted, _ = for_cpu(config)
    assert fitted.explorer.rollout_model.dtype == fitted.trainer.dtype == "bfloat16"


def test_nothing_is_left_to_replace(config: Config) -> None:
    fitted, _ = for_cpu(config)
    assert for_cpu(fitted) == (fitted, [])
    assert Replacement("a", 1, 2) == Replacement("a", 1, 2)


def test_megatron_becomes_the_built_in_trainer_without_its_sizes(config: Config) -> None:
    config.trainer.trainer_strategy = TrainerStrategy.MEGATRON
    config.trainer.megatron = MegatronConfig(tensor_model_parallel_size=2)
    fitted, changes = for_cpu(config)
    told = {change.key: (change.before, change.after) for change in changes}
    assert told["trainer.trainer_strategy"] == ("megatron", "fsdp2")
    assert told["trainer.megatron.tensor_model_parallel_size"] == (2, 1)
    assert fitted.trainer.megatron == MegatronConfig()
