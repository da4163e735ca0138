"""What the engine's process gets is the same, in fewer messages."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from trinity.engine.vllm.lumps import Lumps, Step


def request(**params):
    given = {
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "detokenize": False,
        "logprobs": 0,
        **params,
    }
    return SimpleNamespace(sampling_params=SamplingParams(**given))


class Core:
    """Steps of vLLM's core: ``names`` sample a token each, which is the step's number."""

    def __init__(self, requests, num_tokens=4, width=1):
        self.requests = dict(requests)
        self.lumps = Lumps(num_tokens)
        self.sent = {name: [] for name in requests}
        for name, request in self.requests.items():
            self.lumps.meet(name, request.sampling_params)
        self._number, self._width = -1, width

    def step(self, *names, ends=()):
        self._number += 1
        count = len(names)
        logprobs = LogprobsLists(
            np.full((count, self._width), self._number),
            np.array([[self.logprob(n, self._number)] * self._width for n in names], np.float32),
            np.ones(count, dtype=int),
        )
        outputs = [
            EngineCoreOutput(
                n, [self._number], finish_reason=FinishReason.LENGTH if n in ends else None
            )
            for n in names
        ]
        for name in ends:
            del self.requests[name]
        places = {name: place for place, name in enumerate(names)}
        for message in self.lumps.leaving(outputs, Step(logprobs, places)):
            self.sent[message.request_id].append(message)
        self.lumps.forget_ended(self.requests)

    def logprob(self, name, number):
        return -number / 8 - len(name)

    def tokens(self, name):
        return [token for message in self.sent[name] for token in message.new_token_ids]

    def assert_logprobs_fit(self, name):
        found = np.concatenate([m.new_logprobs.logprobs[:, 0] for m in self.sent[name]])
        assert found.tolist() == [self.logprob(name, token) for token in self.tokens(name)]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 11])
def test_all_tokens_come_in_order_with_their_logprobs(count, width):
    core = Core({"r": request()}, width=width)
    for number in range(count):
        core.step("r", ends=["r"] if number == count - 1 else [])
    assert len(core.sent["r"]) == -(-count // 4)
    assert core.tokens("r") == list(range(count))
    core.assert_logprobs_fit("r")
    assert core.sent["r"][-1].finish_reason == FinishReason.LENGTH
    assert not any(message.finished for message in core.sent["r"][:-1])


def test_requests_that_end_together_lose_nothing():
    names = ["a", "bb", "ccc"]
    core = Core({name: request() for name in names})
    core.step("a", "ccc")
    core.step("bb", "ccc", "a")
    core.step("ccc", "a", "bb", ends=names)
    assert [core.tokens(name) for name in names] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    for name in names:
        core.assert_logprobs_fit(name)


@pytest.mark.parametrize(
    "params", [{"output_kind": RequestOutputKind.DELTA}, {"detokenize": True, "stop": ["."]}]
)
def test_who_follows_the_tokens_gets_each_at_once(params):
    core = Core({"r": request(**params)})
    for _ in range(6):
        core.step("r")
    assert len(core.sent["r"]) == 6
    core.assert_logprobs_fit("r")


def test_who_asked_for_no_logprobs_gets_none():
    core = Core({"r": request(), "without": request(logprobs=None)})
    core.step("r", "without", ends=["r", "without"])
    assert core.sent["without"][0].new_logprobs is None
    core.assert_logprobs_fit("r")


def test_an_aborted_request_leaves_nothing_behind():
    core = Core({"r": request()})
    core.step("r")
    del core.requests["r"]
    core.lumps.forget_ended({})
    core.requests["r"] = request()
    core.lumps.meet("r", core.requests["r"].sampling_params)
    core.step("r")
    core.step("r", ends=["r"])
    assert core.tokens("r") == [1, 2]
