"""An engine at the Tinker service of the tests, which has the model of a folder."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import AutoTokenizer

from tests.tinker_service import KEY, TinkerTestService
from trinity.common.models.loading import end_of_sequence_ids, load_causal_lm
from trinity.engine.tinker.engine import TinkerEngine
from trinity.engine.tinker.settings import TinkerEngineSettings, TinkerServiceSettings

NAME = "toy/model"


def engine_of(service: TinkerTestService, folder: str, **changes: object) -> TinkerEngine:
    place = TinkerServiceSettings(NAME, service.address, **{"timeout_s": 60, **changes})
    return TinkerEngine(TinkerEngineSettings(place, folder))


@contextmanager
def serving(folder: str) -> Iterator[TinkerTestService]:
    """The service, and its key in the environment."""
    made = AutoTokenizer.from_pretrained(folder)
    service = TinkerTestService(
        {NAME: lambda: load_causal_lm(folder, "float32", 0)[0]},
        end_of_sequence_ids(folder),
        made.decode,
    )
    with pytest.MonkeyPatch.context() as patch, service.serving():
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")  # which would be sent at the end, for seconds
        patch.setattr("trinity.engine.tinker.service._PROBE_S", 60.0)
        yield service
