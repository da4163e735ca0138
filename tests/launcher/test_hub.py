"""A hub name that nobody can have is told at once, before anything starts."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from trinity.buffer.rows.base import DataError
from trinity.buffer.rows.open import open_rows
from trinity.common.config import Config
from trinity.common.models.loading import end_of_sequence_ids
from trinity.launcher.checks import find_start_problems
from trinity.launcher.plan import make_plan
from trinity.utils.hub import hub_problem


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.path.endswith("/some/model")
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        if not known:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(b'{"id": "some/model", "siblings": [], "tags": []}' if known else b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a hub that does not answer."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "prepared"))
    return tmp_path


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = HTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


def put_in_cache(cache: Path, **config: object) -> None:
    folder = cache / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(config))


def test_a_name_that_the_hub_has_not(hub: None) -> None:
    assert hub_problem("some/model", "model") is None
    assert "no such model on the hub" in (hub_problem("some/other", "model") or "")
    with pytest.raises(DataError, match="no such data set on the hub"):
        open_rows("some/data")


def test_a_hub_that_does_not_answer_is_asked_no_more(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` would ask again and again."""
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it was asked"))
    assert "can't be asked" in (hub_problem("some/model", "model") or "")
    with pytest.raises(DataError, match=r"'some/data' is no data set .* can't be asked"):
        open_rows("some/data")


def test_what_lies_in_the_cache_needs_no_hub(cache: Path) -> None:
    put_in_cache(cache)
    (cache / "prepared" / "some___data").mkdir(parents=True)
    assert hub_problem("some/model", "model") is None
    assert hub_problem("some/data", "dataset") is None


def test_samples_of_a_model_from_the_hub_end_too(cache: Path, monkeypatch) -> None:
    put_in_cache(cache, eos_token_id=7)
    assert end_of_sequence_ids("some/model") == (7,)


def test_a_missing_model_is_a_problem_of_its_key(cache: Path) -> None:
    config = Config(
        model={"model_path": "some/model", "max_model_len": 8},
        buffer={"explorer_input": {"taskset": {"path": "/tasks"}}},
        explorer={"rollout_model": {"engine_type": "torch"}},
        checkpoint_root_dir=str(cache / "jobs"),
    )
    found = {p.key: p.message for p in find_start_problems(make_plan(config).config)}
    assert "can't be asked" in found["model.model_path"]


def test_home_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = Config(
        model={"model_path": "~/model", "max_model_len": 8},
        buffer={"explorer_input": {"taskset": {"path": "/tasks"}}},
        explorer={"rollout_model": {"engine_type": "torch"}},
    )
    filled = make_plan(config).config
    assert filled.explorer.rollout_model.model_path == "/home/me/model"
    assert filled.model.critic_model_path == filled.model.model_path == "/home/me/model"
