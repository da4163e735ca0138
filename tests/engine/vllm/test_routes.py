"""Routes as vLLM tells them; that it does is seen on GPUs (`tests/gpu/test_routes.py`)."""

import importlib.util
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)


def test_routes_are_those_of_prompt_and_reply():
    import numpy as np

    from trinity.engine.vllm.sampling import routes_of

    found = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    routes = routes_of(SimpleNamespace(routed_experts=found), 5)
    assert routes.shape == (5, 3, 2) and routes[:4].tolist() == found.tolist()
    assert (routes[4] == -1).all()
    assert routes_of(SimpleNamespace(), 5) is None
    assert routes_of(SimpleNamespace(routed_experts=None), 5) is None


def test_an_engine_that_tells_them_has_vllms_own_scheduler():
    from trinity.engine.vllm.settings import VLLMEngineSettings
    from trinity.engine.vllm.starting import _engine_args

    asked = _engine_args(VLLMEngineSettings("/m", returns_routes=True), "/m")
    assert asked["enable_return_routed_experts"] and "scheduler_cls" not in asked
    assert "enable_return_routed_experts" not in _engine_args(VLLMEngineSettings("/m"), "/m")
