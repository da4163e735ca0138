"""Stages: what they take over, what they replace."""

from tests.common.config.files import with_edits
from trinity.common.config import Config, derive, iterate_stages

EXPERIENCES = {"name": "rows", "storage_type": "queue", "path": "sqlite:///a.db"}


def stages(*items, **edits):
    base = {
        "algorithm.optimizer": {"lr": 1e-5},
        "algorithm.kl_loss_fn": "k3",
        "buffer.trainer_input.experience_buffer": EXPERIENCES,
        "synchronizer": {"sync_method": "nccl"},
        "stages": list(items),
        **edits,
    }
    return list(iterate_stages(Config.model_validate(with_edits(base))))


SFT = {
    "stage_name": "warm",
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer": {
        "train_batch_size": 16,
        "trainer_input": {"experience_buffer": {"name": "sft", "path": "/d"}},
    },
}


def test_a_file_without_stages_is_one():
    [(name, config)] = stages()
    assert name == ""
    assert config.name == "test"


def test_names_and_folders():
    [first, second] = stages(SFT, {"stage_name": "rl"}, checkpoint_root_dir="/r")
    assert (first.name, second.name) == ("warm", "rl")
    assert derive(first.config).config.checkpoint_job_dir == "/r/Trinity-RFT/test/warm"
    assert derive(second.config).config.checkpoint_job_dir == "/r/Trinity-RFT/test/rl"


def test_another_algorithm_brings_its_own_parts_but_keeps_the_optimizer():
    [first, _] = stages(SFT, {"stage_name": "rl"})
    algorithm = derive(first.config).config.algorithm
    assert algorithm.optimizer.lr == 1e-5
    assert (algorithm.kl_loss_fn, algorithm.repeat_times) == ("none", 1)


def test_the_same_algorithm_keeps_its_parts():
    [only] = stages({"stage_name": "a", "algorithm": {"optimizer": {"weight_decay": 0.5}}})
    algorithm = only.config.algorithm
    assert (algorithm.kl_loss_fn, algorithm.repeat_times) == ("k3", 8)
    assert (algorithm.optimizer.lr, algorithm.optimizer.weight_decay) == (1e-5, 0.5)


def test_a_buffer_is_replaced_as_a_whole():
    [first, second] = stages(SFT, {"stage_name": "rl"})
    buffer = first.config.buffer.trainer_input.experience_buffer
    assert (buffer.name, buffer.path, buffer.storage_type) == ("sft", "/d", None)
    assert first.config.buffer.batch_size == 4
    assert second.config.buffer.trainer_input.experience_buffer.path == "sqlite:///a.db"


def test_other_tasksets_replace_the_one():
    tasks = {"explorer_input": {"tasksets": [{"path": "/x"}, {"path": "/y"}]}}
    [only] = stages({"stage_name": "a", "buffer": tasks})
    assert only.config.buffer.explorer_input.taskset is None
    assert len(only.config.buffer.explorer_input.tasksets) == 2


def test_a_sync_method_for_two_sides_does_not_bind_a_stage_with_one():
    [first, second] = stages(SFT, {"stage_name": "rl"})
    assert derive(first.config).config.synchronizer.sync_method == "checkpoint"
    assert second.config.synchronizer.sync_method == "nccl"


def test_a_stage_leaves_a_model_for_the_next():
    [first, last] = stages(SFT, {"stage_name": "rl"}, **{"trainer.save_hf_checkpoint": "never"})
    assert first.config.trainer.save_hf_checkpoint == "last"
    assert last.config.trainer.save_hf_checkpoint == "never"
