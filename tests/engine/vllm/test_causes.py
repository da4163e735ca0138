"""The first cause of a failed start, out of the log of several processes."""

import pytest

from trinity.engine.vllm.causes import VLLMStartError, first_cause, telling_the_first_cause

LOG = """WorkerProc failed to start.
Traceback (most recent call last):
  File "worker.py", line 3, in load
    raise ValueError("x")
safetensors.SafetensorError: Error while deserializing header

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
RuntimeError: could not load
EngineCore failed to start.
Traceback (most recent call last):
Exception: WorkerProc initialization failed. See stack trace for root cause.
"""


def test_the_first_error_by_name_is_the_cause():
    assert first_cause(LOG) == "safetensors.SafetensorError: Error while deserializing header"


def test_what_only_points_elsewhere_is_none():
    assert first_cause("Exception: Engine failed. See root cause above.\n") is None
    assert first_cause("") is None


def test_settings_that_vllm_refuses_are_told_without_its_classes():
    pytest.importorskip("vllm")
    told = pytest.raises(VLLMStartError, match="did not start: ValueError: no such quantization")
    with told, telling_the_first_cause():
        raise ValueError("no such quantization")
