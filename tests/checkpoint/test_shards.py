import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

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


WHOLE = torch.arange(30.0).view(5, 6)


def save_ranks(folder, shape, placements, locals_) -> None:
    """The model files of ranks on a mesh of ``shape``, each with its part of a weight."""
    size = len(locals_)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh("cpu", shape)
        for rank, part in enumerate(locals_):
            facts = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
            weight = DTensor.from_local(part.clone(), mesh, placements, run_check=False, **facts)
            torch.save({"w": weight}, folder / layout.shard_name("model", size, rank))
    finally:
        torch.distributed.destroy_process_group()


ROWS, COLUMNS = list(WHOLE.split([2, 2, 1])), list(WHOLE.split(3, dim=1))
CUT = [part for rows in WHOLE.split([3, 2]) for part in rows.split(3, dim=1)]


@pytest.mark.parametrize(
    ("shape", "placements", "locals_"),
    [
        ((1,), [Shard(0)], [WHOLE]),
        ((2,), [Replicate()], [WHOLE] * 2),
        ((3,), [Shard(0)], ROWS),
        ((4,), [Shard(0)], [*ROWS, WHOLE[:0]]),
        ((2,), [Shard(1)], COLUMNS),
        ((2, 3), [Replicate(), Shard(0)], ROWS * 2),
        ((2, 2), [Shard(1), Replicate()], [COLUMNS[0]] * 2 + [COLUMNS[1]] * 2),
        ((2, 2), [Shard(0), Shard(1)], CUT),
    ],
)
def test_a_weight_is_put_together_however_ranks_held_it(tmp_path, shape, placements, locals_):
    save_ranks(tmp_path, shape, placements, locals_)
    assert torch.equal(load_fsdp_state_dict_from_verl_checkpoint(tmp_path)["w"], WHOLE)


def test_parts_that_do_not_make_the_weight_are_refused(tmp_path):
    save_ranks(tmp_path, (2,), [Shard(0)], ROWS[:2])
    with pytest.raises(ValueError, match=r"2 ranks make \(4, 6\), but the tensor is \(5, 6\)"):
        ShardReader(tmp_path).weight("w")
    save_ranks(tmp_path, (2,), [_StridedShard(0, split_factor=2)], [WHOLE[:3], WHOLE[3:]])
    with pytest.raises(ValueError, match=r"placement of .* can't be put together"):
        ShardReader(tmp_path).weight("w")


def test_moments_are_found_by_name_by_the_names_of_a_group_or_by_place(tmp_path):
    """Ours have names, veRL's number their parameters, with the names beside them or without."""
    torch.save(dict.fromkeys("ab", torch.ones(1)), tmp_path / layout.shard_name("model", 1, 0))
    entries = [{"step": 7.0, "exp_avg": torch.full((2,), float(place))} for place in range(2)]
    for names, group in (("ab", {}), ("ba", {"param_names": ["b", "a"]}), ("ab", None)):
        keys = list(names) if group is None else [0, 1]
        state = {"state": dict(zip(keys, entries)), "param_groups": [group or {}]}
        torch.save(state, tmp_path / layout.shard_name("optim", 1, 0))
        reader = ShardReader(tmp_path)
        assert reader.moment_names() == list(names)
        for place, name in enumerate(names):
            found = reader.moments(name)
            assert found["step"] == 7 and found["exp_avg"].tolist() == [place] * 2


def test_steps_are_ours_or_those_of_verls_learning_rate(tmp_path):
    for extra in ({"num_steps": 5}, {"lr_scheduler": {"last_epoch": 5}}):
        torch.save({}, tmp_path / layout.shard_name("model", 1, 0))
        torch.save(extra, tmp_path / layout.shard_name("extra_state", 1, 0))
        assert ShardReader(tmp_path).num_steps() == 5


def test_the_larger_of_two_whole_sets_of_ranks_is_read(tmp_path):
    """A rank's file of an earlier save may have stayed."""
    for size, rank in ((1, 0), (2, 0), (2, 1), (4, 0)):
        torch.save({}, tmp_path / layout.shard_name("model", size, rank))
    assert layout.world_size_of(tmp_path) == 2


def test_a_missing_file_of_the_optimizer_is_named(tmp_path):
    torch.save({}, tmp_path / layout.shard_name("model", 1, 0))
    with pytest.raises(FileNotFoundError, match=r"optim_world_size_1_rank_0\.pt is missing"):
        ShardReader(tmp_path).moment_names()
