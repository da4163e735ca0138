import shutil

import pytest
import torch

from trinity.common.models.allocator import use_tight_memory

NUM_TENSORS = 64
ELEMENTS = 25_000


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
def test_what_is_freed_between_tensors_is_the_place_of_the_next_of_its_size():
    assert use_tight_memory()
    held = [torch.empty(ELEMENTS) for _ in range(NUM_TENSORS)]
    freed = {tensor.data_ptr() for tensor in held[1::2]}
    del held[1::2]
    again = [torch.empty(ELEMENTS) for _ in range(NUM_TENSORS // 2)]
    assert len(freed & {tensor.data_ptr() for tensor in again}) > 0.8 * len(again)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in held + again)


def test_tensors_of_any_size_and_kind_work_on_it():
    use_tight_memory()
    assert torch.empty(0).tolist() == []
    grown = torch.arange(5).clone()
    grown.resize_(1000)
    assert grown[:5].tolist() == [0, 1, 2, 3, 4]
    left, right = torch.randn(70, 90).bfloat16(), torch.randn(90, 80).bfloat16()
    torch.testing.assert_close(
        (left @ right).float(), left.float() @ right.float(), atol=0.2, rtol=0.02
    )
    shared = torch.ones(3).share_memory_()
    assert shared.sum() == 3
    with pytest.raises((RuntimeError, MemoryError)):
        torch.empty(2**62, dtype=torch.int8)
