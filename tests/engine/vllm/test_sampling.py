"""What is asked of vLLM, and what its logprobs then are."""

import pytest

pytest.importorskip("vllm")

from trinity.common.models.protocol import SamplingParams
from trinity.engine.vllm.sampling import is_cut


@pytest.mark.parametrize(
    "asked", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_tokens": 2, "max_tokens": 9}]
)
def test_logprobs_of_a_part_of_the_distribution_are_warned_of(asked):
    assert is_cut(SamplingParams(**asked))


def test_so_are_those_after_a_penalty():
    assert is_cut(SamplingParams(repetition_penalty=1.1))
    assert not is_cut(SamplingParams(temperature=0.6))
