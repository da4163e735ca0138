"""What ranks hold for a checkpoint does not go to their GPUs, whose memory may have no room."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from trinity.trainer.backends.torch.sharding import ShardedWeights
from trinity.trainer.backends.torch.state import held


def part_of_a_gpu_model(local: torch.Tensor) -> DTensor:
    """A part as a rank has it, of a mesh of GPUs, of which there need be none."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)


def test_offloaded_moments_stay_in_cpu_memory():
    weights = ShardedWeights.__new__(ShardedWeights)
    weights._sharded = {"weight": part_of_a_gpu_model(torch.zeros(4, 2))}
    moments = torch.ones(4, 2)
    found = weights.globalize("weight", moments)
    assert found.to_local().data_ptr() == moments.data_ptr()
    assert (found.shape, found.placements) == ((4, 2), (Shard(0),))


def test_parts_areheld_in_cpu_memory():
    part = part_of_a_gpu_model(torch.ones(4, 2))
    copied, same = held(part, copies=True), held(part, copies=False)
    assert copied._local_tensor.data_ptr() != part._local_tensor.data_ptr()
    assert same._local_tensor.data_ptr() == part._local_tensor.data_ptr()
    assert torch.equal(copied._local_tensor, part._local_tensor)
    assert (copied.shape, copied.placements) == (part.shape, part.placements)
    elsewhere = part_of_a_gpu_model(torch.ones(4, 2, device="meta"))
    with pytest.raises(NotImplementedError, match="copy out of meta tensor"):
        held(elsewhere, copies=True)
