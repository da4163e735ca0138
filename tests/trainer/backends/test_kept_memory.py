"""What a layer keeps for its backward pass on a CPU: what the estimate of memory counts."""

import pytest
import torch

from trinity.common.config.memory import joined_layer_bytes, lean_layer_bytes
from trinity.common.config.shape import ModelShape
from trinity.common.models.kernels.decoder import DecoderSizes
from trinity.common.models.kernels.layer import Trained, TrainedLayer
from trinity.common.models.kernels.products import are_fit
from trinity.utils.processor import has_own_products

ROWS = 4096


@pytest.mark.parametrize("norms_heads", [False, True])
def test_a_joined_layer_keeps_what_is_counted(norms_heads):
    shape = ModelShape(0, 1, 576, 1536, 192, 576, 100, norms_heads=norms_heads)
    sizes = DecoderSizes(
        width=576, inner=1536, heads=9, kv_heads=3, head_size=64, eps=1e-5, scale=0.125
    )
    norm = Trained(torch.ones(64)) if norms_heads else Trained(None)
    nothing = Trained(None)
    linears = [(nothing, nothing)] * 7
    layer = TrainedLayer(linears, [nothing, norm, norm, nothing], sizes, None)
    hidden = torch.zeros(ROWS, 576, dtype=torch.bfloat16)
    kept, scales = layer._room_kept(hidden)
    found = hidden.nbytes + kept.nbytes
    assert found == pytest.approx(ROWS * joined_layer_bytes(shape), rel=1e-3)
    assert scales.nbytes < 0.01 * found
    assert joined_layer_bytes(shape) == lean_layer_bytes(shape, 2) - 4 * 576


def test_where_layers_are_joined_is_known_without_compiling():
    assert has_own_products() == are_fit(torch.zeros(2, 2, dtype=torch.bfloat16))
