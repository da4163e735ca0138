"""What is advised when a GPU has no memory left (seen on a GPU: tests/gpu/test_faults.py)."""

import pytest

from tests.shapes import QWEN_1_5B, shape_folder
from trinity.common.config.shape import find_shape
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.out_of_memory import _fewer_tokens, _less_kept, _tokens_in
from trinity.trainer.backends.torch.settings import TorchEngineSettings

GIB = 2**30


@pytest.fixture
def folder(tmp_path):
    return shape_folder(tmp_path, {**QWEN_1_5B, "tie_word_embeddings": False})


def asking(folder, tokens, **changes):
    return TorchEngineSettings(folder, micro_batches=MicroBatchRule(max_tokens=tokens), **changes)


def test_as_many_tokens_are_advised_as_fit(folder):
    text = _fewer_tokens(asking(folder, 65536), 40 * GIB)
    fitting = int(text.split("from 65536 to ")[1].split(".")[0])
    assert fitting % 256 == 0 and 8192 <= fitting <= 16384
    assert "enable_gradient_checkpointing" in text
    more = _tokens_in(40 * GIB, find_shape(folder), asking(folder, 1, gradient_checkpointing=True))
    assert more > 4 * fitting


def test_half_the_tokens_where_all_seemed_to_fit(folder):
    text = _fewer_tokens(asking(folder, 4096), 60 * GIB)
    assert "from 4096 to 2048" in text


def test_other_settings_where_no_token_fits(folder):
    text = _fewer_tokens(asking(folder, 4096), 1 * GIB)
    assert "optimizer_offload: true, which frees" in text and "max_token_len" not in text
    rest = _less_kept(asking(folder, 1, optimizer_offload=True, gradient_checkpointing=True))
    assert "offload" not in rest and "gpu_per_node" in rest
