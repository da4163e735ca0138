"""Settings of all tests: threads that sleep while they wait, so that tests share cores well."""

import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def keeps_main() -> Iterator[None]:
    """Streamlit puts a tested page in the place of ``__main__``: new processes would run it."""
    main = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = main
