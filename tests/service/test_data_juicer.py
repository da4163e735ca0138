"""The Data-Juicer service. The client is tested against a stand-in; the real one where it is
installed, here or in the environment that TRINITY_DATA_JUICER_PYTHON names (`make test-data`).
"""

import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.buffer.samples import experience, tasks_of
from tests.common.models.toy import tokenizer
from tests.ports import free_port
from trinity.buffer.operators import EXPERIENCE_OPERATORS
from trinity.buffer.operators.mappers import RewardShapingMapper
from trinity.buffer.pipelines.task import run_task_pipeline
from trinity.buffer.rows import open_rows
from trinity.common.config.data_processor import TaskPipelineConfig
from trinity.common.config.service import DataJuicerServiceConfig
from trinity.common.errors import DeadlineError
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.api import ApiServer
from trinity.common.models.fake import FakeEngine
from trinity.common.models.protocol import Completion
from trinity.service.data_juicer.client import DataJuicerClient, DataJuicerError, process_of
from trinity.service.data_juicer.operator import DataJuicerOperator
from trinity.service.data_juicer.process import PYTHON_ENV, DataJuicerService
from trinity.service.data_juicer.processor import DataJuicerProcessor
from trinity.service.data_juicer.server import make_server

HAS_DATA_JUICER = bool(find_spec("data_juicer") or os.environ.get(PYTHON_ENV))
needs_data_juicer = pytest.mark.skipif(
    not HAS_DATA_JUICER, reason="Data-Juicer is not installed: make test-data"
)


def serving(server: ThreadingHTTPServer) -> str:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


class Longer:
    """Stands in for the operators: keeps texts above a length, and tells their lengths."""

    def __init__(self) -> None:
        self.open: set[str] = set()

    def create(self, request: dict[str, Any]) -> dict[str, Any]:
        if "no_such_filter" in request["process"][0]:
            raise ValueError("no operator 'no_such_filter'")
        self.open.add("1")
        return {"session": "1"}

    def process(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["session"] not in self.open:
            raise KeyError(request["session"])
        kept = [
            {**row, "stats": {"length": len(row["text"])}}
            for row in request["rows"]
            if len(row["text"]) > 7
        ]
        return {"rows": kept, "metrics": {"dropped/longer": len(request["rows"]) - len(kept)}}

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        self.open.discard(request["session"])
        return {}


@pytest.fixture
def stand_in() -> Iterator[tuple[str, Longer]]:
    actions = Longer()
    server = make_server("127.0.0.1", 0, actions, "test")
    yield serving(server), actions
    server.shutdown()


async def test_rows_go_there_and_back(stand_in: tuple[str, Longer]):
    url, actions = stand_in
    client = DataJuicerClient(url, [{"longer": {}}])
    rows = [{"text": "short", "n": 1}, {"text": "long enough", "n": {"deep": [2]}}]
    kept, metrics = await client.process_rows(rows)
    assert kept == [{**rows[1], "stats": {"length": 11}}]
    assert metrics == {"dropped/longer": 1}
    await client.close()
    assert actions.open == set()


async def test_what_fails_there_is_told_here(stand_in: tuple[str, Longer]):
    url, actions = stand_in
    with pytest.raises(DataJuicerError, match="no operator 'no_such_filter'"):
        await DataJuicerClient(url, [{"no_such_filter": {}}]).prepare()
    client = DataJuicerClient(url, [{"longer": {}}])
    await client.prepare()
    actions.open.clear()
    with pytest.raises(DataJuicerError, match="No such session"):
        await client.process_rows([{"text": "x"}])


async def test_a_service_that_is_not_there_is_named():
    client = DataJuicerClient("http://127.0.0.1:9", [], start_timeout_s=0.1)
    with pytest.raises(DeadlineError, match=r"127\.0\.0\.1:9.*auto_start"):
        await client.prepare()


class Refusing(Longer):
    """Answers, but can't close a session."""

    def close(self, request: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("not now")


async def test_the_service_ends_though_its_session_does_not(tmp_path: Path, monkeypatch):
    server = make_server("127.0.0.1", 0, Refusing(), "test")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\ntrap '' TERM\nread -r _\n")
    script.chmod(0o755)
    monkeypatch.setenv(PYTHON_ENV, str(script))
    processor = DataJuicerProcessor(
        [{"name": "longer"}], service_config={"server_url": serving(server)}
    )
    await processor.prepare()
    ours = processor._service._process = processor._service._spawn()
    with pytest.raises(DataJuicerError, match="not now"):
        await processor.close()
    server.shutdown()
    assert ours.poll() is not None


async def test_experiences_are_filtered_and_learn_their_stats(stand_in: tuple[str, Longer]):
    url, _ = stand_in
    operator = DataJuicerOperator([{"name": "longer"}], service_config={"server_url": url})
    await operator.prepare()
    exps = [experience("a"), experience("b")]
    exps[0].response_text = "short"
    kept, metrics = await operator.process(exps)
    await operator.close()
    assert tasks_of(kept) == ["b"]
    assert kept[0].info["length"] == len("answer b")
    assert metrics == {"data_juicer/dropped/longer": 1, "filtered_count": 1}


def test_recipes_and_lists_name_the_same_operators(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("project_name: x\nprocess:\n  - words_num_filter:\n      min_num: 3\n")
    expected = [{"words_num_filter": {"min_num": 3}}]
    assert process_of((), str(recipe)) == expected
    assert process_of([{"name": "words_num_filter", "args": {"min_num": 3}}], None) == expected
    recipe.write_text("process: []")
    with pytest.raises(DataJuicerError, match="no list `process`"):
        process_of((), str(recipe))
    with pytest.raises(DataJuicerError, match="can't be read"):
        process_of((), str(tmp_path / "missing.yaml"))
    with pytest.raises(DataJuicerError, match="no operators"):
        process_of((), None)


def test_operators_that_compare_rows_want_them_all():
    assert DataJuicerClient("", [{"document_deduplicator": None}]).needs_all_rows
    assert not DataJuicerClient("", [{"words_num_filter": None}]).needs_all_rows


def test_it_is_an_operator_by_name():
    assert EXPERIENCE_OPERATORS.get("data_juicer") is DataJuicerOperator


# --- the real one ---------------------------------------------------------------------------


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[DataJuicerService]:
    config = DataJuicerServiceConfig(auto_start=True, port=free_port())
    started = DataJuicerService(config, tmp_path / "service.log")
    await started.start()
    yield started
    await started.stop()


def questions(count: int) -> list[dict[str, Any]]:
    """Word problems in the manner of GSM8K; every third is short, every fifth a repetition."""
    rows = []
    for i in range(count):
        number = 7 if i % 5 == 4 else i
        text = f"Ann has {number} apples and buys {number + 2} more at the market. "
        long = "How many apples does she have in all, and how many can each of two friends get?"
        rows.append({"id": i, "question": "Too short." if i % 3 == 0 else text + long,
                     "answer": f"#### {2 * number + 2}", "extra": {"number": i}})  # fmt: skip
    return rows


@needs_data_juicer
@pytest.mark.slow
async def test_cpu_operators_clean_a_task_set(service: DataJuicerService, tmp_path: Path):
    source = tmp_path / "raw.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in questions(30)))
    process = [
        {"words_num_filter": {"text_key": "question", "min_num": 10, "max_num": 60}},
        {"document_deduplicator": {"text_key": "question"}},
    ]
    config = TaskPipelineConfig(
        operators=[{"name": name, "args": args} for op in process for name, args in op.items()],
        inputs=[str(source)],
        target_fields=["question", "answer", "id", "extra"],
    )
    at = DataJuicerServiceConfig(server_url=service.url)
    metrics = await run_task_pipeline(config, at, str(tmp_path / "clean"))
    tasks = open_rows(str(tmp_path / "clean"))
    rows = [tasks[index] for index in range(len(tasks))]
    texts = [row["question"] for row in rows]
    assert "Too short." not in texts
    assert len(texts) == len(set(texts))
    assert all(row["num_words"] >= 10 and row["extra"] == {"number": row["id"]} for row in rows)
    assert metrics["task_pipeline/dropped/words_num_filter"] == 10


@needs_data_juicer
@pytest.mark.slow
async def test_experience_statistics_shape_rewards(service: DataJuicerService):
    operator = DataJuicerOperator(
        [{"name": "text_length_filter", "args": {"min_len": 3}}],
        service_config={"server_url": service.url},
    )
    await operator.prepare()
    exps = [experience(0), experience(1), experience(2)]
    exps[1].response_text = "no"
    kept, _ = await operator.process(exps)
    await operator.close()
    assert tasks_of(kept) == [0, 2]
    shaping = RewardShapingMapper([{"stats_key": "text_len", "op_type": "ADD", "weight": 0.5}])
    shaped, _ = shaping.process(kept)
    assert [e.reward for e in shaped] == [1.0 + 0.5 * len("answer 0")] * 2


@needs_data_juicer
@pytest.mark.slow
async def test_an_unknown_operator_is_named_with_its_neighbour(service: DataJuicerService):
    with pytest.raises(DataJuicerError, match=r"'words_nun_filter'.*'words_num_filter'"):
        await DataJuicerClient(service.url, [{"words_nun_filter": {}}]).prepare()


@needs_data_juicer
@pytest.mark.slow
async def test_the_service_ends_with_its_owner(service: DataJuicerService):
    process = service._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as when we are killed
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() == 0


class ChatServer(BaseHTTPRequestHandler):
    """Answers chats as a judge that finds long questions hard."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = 5 if "two friends" in str(body["messages"]) else 1
        names = "linguistic_complexity conceptual_depth prior_knowledge step_complexity ambiguity"
        verdict = {"dimension_scores": dict.fromkeys(names.split(), score), "flags": ["x"]}
        verdict["rationale"] = "because"
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": json.dumps(verdict)},
        }
        data = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@needs_data_juicer
@pytest.mark.slow
async def test_an_llm_operator_asks_an_openai_server(service: DataJuicerService):
    pytest.importorskip("openai")
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatServer)
    arguments = {
        "api_or_hf_model": "judge",
        "min_score": 0.5,
        "input_keys": ["question", "answer"],
        "field_names": ["Question", "Answer"],
        "model_params": {"base_url": f"{serving(server)}/v1", "api_key": "EMPTY"},
    }
    client = DataJuicerClient(service.url, [{"llm_difficulty_score_filter": arguments}])
    kept, _ = await client.process_rows(questions(6))
    server.shutdown()
    assert [row["id"] for row in kept] == [1, 2, 4, 5]
    assert all(row["stats"]["llm_difficulty_score"] == 1.0 for row in kept)


class JudgeEngine(FakeEngine):
    """Samples what `ChatServer` answers, as tokens."""

    def __init__(self) -> None:
        super().__init__([])
        self.tokenizer = tokenizer()

    async def sample(self, prompt_ids, params, adapter=None):
        score = 5 if "two friends" in self.tokenizer.decode(list(prompt_ids)) else 1
        names = "linguistic_complexity conceptual_depth prior_knowledge step_complexity ambiguity"
        verdict = {"dimension_scores": dict.fromkeys(names.split(), score), "flags": ["x"]}
        text = json.dumps(verdict | {"rationale": "because"})
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        return [Completion(ids, [-1.0] * len(ids), "stop", [0] * len(ids))]


@needs_data_juicer
@pytest.mark.slow
async def test_an_llm_operator_asks_our_own_server(service: DataJuicerService):
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    engine = JudgeEngine()
    model = ModelWrapper(engine, ModelSettings("judge", name="judge"), engine.tokenizer)
    server = ApiServer()
    server.start({"": model})
    arguments = {
        "api_or_hf_model": "judge",
        "min_score": 0.5,
        "input_keys": ["question", "answer"],
        "field_names": ["Question", "Answer"],
        "model_params": {"base_url": f"{server.address}/v1", "api_key": server.api_key},
    }
    client = DataJuicerClient(service.url, [{"llm_difficulty_score_filter": arguments}])
    kept, _ = await client.process_rows(questions(6))
    server.stop()
    assert [row["id"] for row in kept] == [1, 2, 4, 5]
