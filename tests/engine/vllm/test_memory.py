"""Too little memory on a GPU: the setting that is named, and the value that would do."""

from dataclasses import replace

import pytest

from tests.shapes import LLAMA_8B, shape_folder
from trinity.engine.vllm.memory import GPUMemory, too_little_free, too_small
from trinity.engine.vllm.settings import VLLMEngineSettings

GIB = 2**30
CARD = GPUMemory(free=30 * GIB, total=80 * GIB)


@pytest.fixture
def settings(tmp_path):
    return VLLMEngineSettings(shape_folder(tmp_path, LLAMA_8B), max_model_len=8192)


def test_what_others_hold_lowers_the_share(settings):
    found = too_little_free(settings, CARD)
    assert found is not None and "gpu_memory_utilization is 0.9" in found
    assert "72.0 GiB" in found and "others hold 50.0" in found and "Lower it to 0.37" in found
    assert too_little_free(replace(settings, gpu_memory_utilization=0.37), CARD) is None


def test_a_share_too_small_for_the_weights_names_what_would_do(settings):
    found = too_small(replace(settings, gpu_memory_utilization=0.1), CARD)  # 15 GiB of weights
    assert found is not None and "raise gpu_memory_utilization to 0.23" in found
    assert "max_model_len" not in found.split("To make it fit")[1]
    assert too_small(replace(settings, gpu_memory_utilization=0.23), CARD) is None


def test_a_sequence_too_long_for_the_cache_is_named(settings):
    long = replace(settings, gpu_memory_utilization=0.25, max_model_len=131072)
    found = too_small(long, CARD)  # 128 KiB a token
    assert found is not None and "lower max_model_len from 131072 to " in found
    fitting = int(found.split("from 131072 to ")[1].split(",")[0])
    assert too_small(replace(long, max_model_len=fitting), CARD) is None
