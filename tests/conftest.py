"""Settings of all tests: their order, and threads that sleep while they wait, to share cores."""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

with suppress(ImportError):  # not in each environment
    from hypothesis import HealthCheck, settings

    # A pause of the machine is no fault of a test, and a gate gives the same answer twice.
    settings.register_profile(
        "any machine",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="CI" in os.environ,
    )
    settings.load_profile("any machine")


@pytest.hookimpl(trylast=True)  # after the marks that folders give their tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones first: at the end no worker waits for a long one of another."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def draws_the_same() -> None:
    """Numbers that a test draws are the same alone, after others and beside others."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)


@pytest.fixture(autouse=True)
def keeps_main() -> Iterator[None]:
    """Streamlit puts a tested page in the place of ``__main__``: new processes would run it."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
