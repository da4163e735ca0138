"""Requests that no engine may get."""

import math

import pytest

from trinity.common.models import ModelSettings, SamplingParams
from trinity.common.models.sampling import sampling_params


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": -1},
        {"temperature": -1.0},
        {"temperature": 1e-6},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"top_k": 2**31},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"repetition_penalty": 0.0},
    ],
)
def test_values_that_would_reach_other_requests_are_refused_at_once(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"A request with {name} = {value} is not possible"):
        SamplingParams(**wrong)
    settings = ModelSettings("folder", max_model_len=100)
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        sampling_params(settings, 5, wrong, seed=0)


def test_more_tokens_than_engines_count_are_refused():
    with pytest.raises(ValueError, match="min_tokens = 2147483648 is not possible"):
        SamplingParams(min_tokens=2**31)


@pytest.mark.parametrize("temperature", [0, 0.0, 0.01, 1, 5.0])
def test_values_at_their_bounds_are_taken(temperature):
    params = SamplingParams(
        n=1, temperature=temperature, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=1, min_tokens=0
    )
    assert params.temperature == temperature
    assert SamplingParams(top_k=2**31 - 1, min_tokens=2**31 - 1).top_k == 2**31 - 1
    assert SamplingParams(top_k=0, max_tokens=None).top_k == 0
