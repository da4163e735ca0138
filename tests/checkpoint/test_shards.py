import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trinity.checkpoint import layout
from trinity.checkpoint.shards import ShardReader
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint


def test_one_rank_saves_plain_tensors(tmp_path):
    weight = torch.arange(6.0).view(2, 3)
    torch.save({"w": weight, "tied": weight}, tmp_path / layout.shard_name("model", 1, 0))
    found = load_fsdp_state_dict_from_verl_checkpoint(tmp_path)
    assert torch.equal(found["w"], weight)
    assert found["w"].data_ptr() == found["tied"].data_ptr()


def test_no_shards_and_missing_ranks_are_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model_world_size"):
        load_fsdp_state_dict_from_verl_checkpoint(tmp_path)
    torch.save({}, tmp_path / layout.shard_name("model", 3, 1))
    with pytest.raises(FileNotFoundError, match=r"3 ranks, but those of rank \[0, 2\]"):
        load_fsdp_state_dict_from_verl_checkpoint(tmp_path)


def test_a_checkpoint_of_another_architecture_is_refused_by_names_and_shapes(tmp_path):
    torch.save(
        {"w": torch.ones(2, 3), "tied": torch.ones(2, 3)},
        tmp_path / layout.shard_name("model", 1, 0),
    )
    reader = ShardReader(tmp_path)
    reader.check_same({"w": (2, 3)}, ["w", "tied"])
    for wanted, known, message in (
        ({"w": (2, 3), "b": (3,)}, ["w", "b", "tied"], r"no b \(1 of 2 are missing\)"),
        ({"w": (2, 3)}, ["w"], r"its tied is not in the model \(1 of 2 are not\)"),
        ({"w": (4, 3)}, ["w", "tied"], r"w is \(2, 3\) there, and \(4, 3\) in the model"),
    ):
        with pytest.raises(ValueError, match=f"another architecture: .*{message}"):
            reader.check_same(wanted, known)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    torch.save({"w": Evil()}, tmp_path / layout.shard_name("model", 1, 0))
    with pytest.raises(ValueError, match="can't be read as tensors"):
        ShardReader(tmp_path).weights()


def test_shards_are_read_without_a_word_of_missing_groups(tmp_path):
    """PyTorch warns at each tensor whose process group is not there, as in `trinity convert`."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        torch.save({"w": weight}, tmp_path / layout.shard_name("model", 1, 0))
    finally:
        torch.distributed.destroy_process_group()
    read = f"""if True:
        from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint
        print(load_fsdp_state_dict_from_verl_checkpoint({str(tmp_path)!r})["w"].tolist())
    """
    told = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert told.stdout.strip() == "[0.0, 1.0, 2.0, 3.0]"
    assert "DeviceMesh" not in told.stderr
