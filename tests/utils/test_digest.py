import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trinity.utils.digest import weights_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
FEW = st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 0.5]), min_size=2, max_size=9)


def digest(tensor: Tensor, name: str = "w") -> str:
    return weights_digest([(name, tensor)])


def flipped(tensor: Tensor, bit: int) -> Tensor:
    data = tensor.clone().contiguous().view(torch.uint8)
    data[bit // 8] ^= 1 << (bit % 8)
    return data.view(tensor.dtype)


@given(
    size=st.integers(1, 70) | st.integers(2**14 - 2, 2**15 + 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_bit_flip_changes_it(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randint(0, 99, (size,)).to(dtype)
    bit = data.draw(st.integers(0, tensor.nbytes * 8 - 1))
    assert digest(flipped(tensor, bit)) != digest(tensor)


@given(FEW, st.randoms(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=200, deadline=None)
def test_any_permutation_changes_it(values: list[float], random, dtype: torch.dtype) -> None:
    moved = values[:]
    random.shuffle(moved)
    assume(list(map(str, moved)) != list(map(str, values)))
    assert digest(torch.tensor(moved, dtype=dtype)) != digest(torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("distance", [1, 2, 2**13, 2**14, 2**15, 65_521])
def test_elements_far_apart_may_not_change_places(distance: int) -> None:
    tensor = torch.zeros(70_000)
    tensor[0] = 1.0
    assert digest(tensor) != digest(tensor.roll(distance))


def test_balanced_moves_are_seen() -> None:
    assert digest(torch.tensor([1.0, 0, 0, 1])) != digest(torch.tensor([0.0, 1, 1, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 8, 2**14 * 5 + 1])
def test_views_are_what_they_show(dtype: torch.dtype, size: int) -> None:
    large = torch.randint(0, 2, (2 * size + 1,)).to(dtype)
    for view in (large[1 : size + 1], large[1::2], large[:size].flip(0)):
        assert digest(view) == digest(view.clone())


def test_matrices_are_read_row_by_row() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    assert digest(matrix.T) == digest(matrix.T.contiguous()) != digest(matrix)


def test_name_dtype_and_shape_count() -> None:
    zeros = torch.zeros(4)
    found = {
        digest(zeros),
        digest(zeros, "v"),
        digest(zeros.reshape(2, 2)),
        digest(zeros.int()),
        digest(torch.zeros(8, dtype=torch.bfloat16)),
        digest(torch.zeros(5)),
        digest(torch.tensor(0.0)),
        digest(torch.zeros(0)),
        digest(torch.zeros(0, 3)),
        weights_digest([]),
    }
    assert len(found) == 10


def test_order_of_names_does_not_count() -> None:
    weights = [("a", torch.ones(3)), ("b", torch.zeros(3))]
    assert weights_digest(weights) == weights_digest(reversed(weights))
    swapped = [("a", torch.zeros(3)), ("b", torch.ones(3))]
    assert weights_digest(weights) != weights_digest(swapped)


def test_the_definition_does_not_drift() -> None:
    weights = {
        "a": torch.arange(2**14 * 33 + 5, dtype=torch.float32),
        "b": torch.arange(7, dtype=torch.bfloat16),
    }
    assert weights_digest(weights.items()) == "ec1fa879579ead36d668b990b3d07a32"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree() -> None:
    weights = {"a": torch.randn(2**14 * 600 + 5), "b": torch.randn(7).bfloat16()}
    on_gpu = {name: tensor.cuda() for name, tensor in weights.items()}
    assert weights_digest(on_gpu.items()) == weights_digest(weights.items())
