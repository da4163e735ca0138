"""The compiled products against float64; a row's bits don't depend on the rows beside it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.common.models import kernels
from trinity.common.models.kernels import products

pytestmark = pytest.mark.skipif(
    not products.are_fit(torch.zeros(1, 2, dtype=torch.bfloat16)),
    reason="this machine multiplies bfloat16 by PyTorch's library",
)

SIZES = [(1, 2, 1), (13, 50, 70), (64, 576, 192), (9, 4000, 48), (2100, 34, 97)]


def halves(*shape):
    return torch.randn(*shape).to(torch.bfloat16)


def gap(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("rows, depth, columns", SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows, depth, columns, has_bias):
    x, weight = halves(rows, depth), halves(columns, depth)
    bias = halves(columns) if has_bias else None
    wanted = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    found = kernels.linear(x, weight, bias)
    assert gap(found, wanted) < 4e-3
    packed = kernels.PackedWeight(weight)
    assert torch.equal(kernels.linear(x, packed, bias), found)
    assert torch.equal(packed.unpacked(), weight)


@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_sum_of_products(rows, depth, columns):
    pairs = [(halves(rows, depth), halves(depth, 2 * columns)) for _ in range(3)]
    wanted = sum(a.double() @ b.double() for a, b in pairs)
    assert gap(kernels.sum_of_products(*pairs), wanted) < 4e-3


@pytest.mark.parametrize("rows, depth, columns", SIZES)
def test_a_transposed_product_adds_to_float32(rows, depth, columns):
    left, right = halves(rows, depth), halves(rows, 2 * columns)
    total = torch.randn(depth, 2 * columns)
    wanted = total.double() + left.double().t() @ right.double()
    kernels.add_transposed_product(total, left, right)
    assert gap(total, wanted) < 1e-6


def test_columns_of_wider_matrices_and_heads_of_shapes_are_taken():
    wide, weight = halves(20, 96), halves(10, 32)
    rows = wide[:, 32:64]
    wanted = rows.double() @ weight.double().t()
    assert gap(kernels.linear(rows, weight), wanted) < 4e-3
    shaped = kernels.linear(rows.reshape(4, 5, 32), weight)
    assert shaped.shape == (4, 5, 10)
    assert torch.equal(shaped.flatten(0, 1), kernels.linear(rows, weight))


@settings(max_examples=30, deadline=None)
@given(
    first=st.integers(0, 40),
    count=st.integers(1, 30),
    after=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_the_bits_of_a_row_do_not_depend_on_the_batch(first, count, after, seed):
    torch.manual_seed(seed)
    x, weight = halves(first + count + after, 1700), halves(50, 1700)
    found = kernels.linear(x, weight)[first : first + count]
    assert torch.equal(found, kernels.linear(x[first : first + count], weight))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bits_do_not_depend_on_threads(threads):
    x, weight, grad = halves(100, 64), halves(96, 64), halves(100, 96)
    totals = torch.zeros(2, 96, 64)
    found, before = [], torch.get_num_threads()
    for count, total in zip((1, threads), totals, strict=True):
        torch.set_num_threads(count)
        kernels.add_transposed_product(total, grad, x)
        found.append((kernels.linear(x, weight), kernels.sum_of_products((grad, weight))))
    torch.set_num_threads(before)
    assert torch.equal(*totals)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_several_layers_give_what_each_gives_alone():
    x, weights = halves(70, 64), [halves(n, 64) for n in (96, 33, 200)]
    biases = [halves(96), None, halves(200)]
    layers = [*zip(weights, biases, strict=True), (kernels.PackedWeight(weights[1]), None)]
    wanted = [kernels.linear(x, weight, bias) for weight, bias in layers]
    found = kernels.linears(x, *layers)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_odd_depths_are_left_to_pytorch():
    x, weight = halves(5, 33), halves(4, 33)
    assert torch.equal(kernels.linear(x, weight), torch.nn.functional.linear(x, weight))
    odd = halves(3, 5), halves(5, 8)
    assert gap(kernels.sum_of_products(odd), odd[0].double() @ odd[1].double()) < 4e-3
