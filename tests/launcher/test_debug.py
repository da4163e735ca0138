import asyncio
import json
import sqlite3

import pytest
from rich.console import Console

from trinity.common.config import load_config
from trinity.common.errors import ConfigError
from trinity.common.models.fake import FakeEngine
from trinity.common.models.protocol import SamplingParams
from trinity.launcher.debug import DebugError, DebugRun, debug_workflow
from trinity.launcher.engine_link import EngineClient, EngineServer

EVIL = '<script>alert("x")</script>[red]</pre>'
TITLE = "\x1b]0;evil\x07"


@pytest.fixture
def config(tmp_path):
    rows = [{"q": "1+1", "a": "2"}, {"q": f"2+2 {EVIL}", "a": "4"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "c.yaml").write_text(
        f"""
project: p
name: n
mode: explore
checkpoint_root_dir: {tmp_path}
algorithm: {{algorithm_type: grpo, repeat_times: 4}}
model: {{model_path: {tmp_path}/model, max_model_len: 128, max_response_tokens: 16}}
explorer: {{rollout_model: {{engine_type: torch}}}}
buffer:
  batch_size: 2
  explorer_input:
    taskset:
      name: sums
      path: {tmp_path}/rows.jsonl
      default_workflow_type: simple_workflow
      default_reward_fn_type: exact_match_reward
      format: {{prompt_key: q, response_key: a}}
"""
    )
    return lambda *overrides: load_config(tmp_path / "c.yaml", overrides)


async def test_a_workflow_on_scripted_replies(config, tmp_path):
    console = Console(record=True, width=100)
    run = DebugRun(config(), task=1, repeat=2, fake=("4", EVIL + TITLE), output=tmp_path / "out")
    experiences = await debug_workflow(run, console)
    assert [e.reward for e in experiences] == [1, 0]
    shown = console.export_text()
    assert EVIL in shown and "accuracy 1" in shown
    assert "\x1b]0;" not in shown and "\\x1b]0;evil" in shown
    page = (tmp_path / "out" / "index.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and page.count("<pre") == 5
    assert "default-src 'none'" in page
    with sqlite3.connect(tmp_path / "out" / "experiences.db") as database:
        assert database.execute("select count(*) from debug_buffer").fetchone() == (2,)


@pytest.mark.parametrize(
    ("values", "text"),
    [({"task": 5}, "has 2 tasks"), ({"taskset": "x"}, "there are: sums")],
)
async def test_what_is_not_there_is_named(config, tmp_path, values, text):
    run = DebugRun(config(), fake=("x",), output=tmp_path / "out", **values)
    with pytest.raises(DebugError, match=text):
        await debug_workflow(run, Console(quiet=True))


async def test_an_engine_that_does_not_run_so_is_named_with_what_to_do(config, tmp_path):
    run = DebugRun(config("explorer.rollout_model.engine_type=vllm"), output=tmp_path / "out")
    with pytest.raises(DebugError, match=r"engine_type is 'vllm'\. Add --cpu"):
        await debug_workflow(run, Console(quiet=True))


async def test_mistakes_and_failures_are_shown(config, tmp_path):
    loaded = config("buffer.explorer_input.taskset.default_reward_fn_type=exact_mtach_reward")
    with pytest.raises(ConfigError, match="exact_match_reward"):
        await debug_workflow(DebugRun(loaded, fake=("x",)), Console(quiet=True))
    loaded = config("buffer.explorer_input.taskset.default_workflow_type=rubric_judge_workflow")
    console = Console(record=True, width=100)
    with pytest.raises(DebugError):
        await debug_workflow(DebugRun(loaded, fake=("x",), output=tmp_path / "out"), console)
    assert "needs a judge" in console.export_text()


async def test_an_agent_that_wants_a_client_is_told_that_scripted_models_have_none(
    config, tmp_path
):
    loaded = config("buffer.explorer_input.taskset.default_workflow_type=react_workflow")
    console = Console(record=True, width=200)
    with pytest.raises(DebugError):
        await debug_workflow(DebugRun(loaded, fake=("x",), output=tmp_path / "out"), console)
    shown = console.export_text()
    assert "scripted model has no OpenAI client" in shown and "without --fake" in shown


async def test_an_engine_is_used_from_another_terminal(tmp_path):
    engine = FakeEngine([[5, 6], [7]], end_ids=[7])
    server = EngineServer(engine, tmp_path / "e.sock")
    client = EngineClient(tmp_path / "e.sock")
    with pytest.raises(OSError):
        await client.prepare()
    await server.start()
    await client.prepare()
    samples = await client.sample([1, 2], SamplingParams(n=2, stop=("x",), seed=3))
    assert [s.token_ids for s in samples] == [[5, 6], [7]] and samples[1].finish_reason == "stop"
    assert engine.params[0] == SamplingParams(n=2, stop=("x",), seed=3)
    assert await client.logprobs([1, 2, 3]) == [-2.0, -2.0]
    with pytest.raises(RuntimeError, match="In the engine"):
        await client.sample([1], SamplingParams())
    await server.close()
    await asyncio.sleep(0)
