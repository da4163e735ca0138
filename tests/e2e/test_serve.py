"""`mode: serve`: one command answers users and trains on what they reward."""

from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import Start
from tests.e2e.test_grpo_run import scalars
from tests.e2e.toy import Toy
from tests.ports import free_port

pytestmark = pytest.mark.long


def test_a_service_learns_from_feedback(toy: Toy, start: Start, tmp_path: Path) -> None:
    settings = {"buffer__total_steps": None, "buffer__explorer_input": {}, "mode": "serve"}
    running = start(toy.config(tmp_path, explorer__proxy_port=free_port(), **settings))
    file = running.job / "explorer_server_url.txt"
    root = running.wait_for(lambda: file.exists() and file.read_text().strip(), "address")
    address = f"{root}/v1"
    key = (running.job / "api_key.txt").read_text()
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=400) as http:

        def version() -> int:
            return http.get(f"{root}/health").json()["version"]

        for step in range(1, 3):
            for run in range(4):
                ask = {"messages": [{"role": "user", "content": "1"}], "temperature": 1.0}
                answer = http.post(f"{address}/chat/completions", json=ask).json()
                told = {"reward": run / 4, "msg_ids": [answer["id"]], "task_id": "one"}
                http.post(f"{root}/feedback", json=told).raise_for_status()
            assert http.post(f"{root}/commit").json() == {"experiences": 4}
            running.wait_for(lambda step=step: version() == step, f"weights of version {step}")
        assert http.get(f"{root}/status").json()["explorer_step"] == 2
    running.interrupt()
    assert running.wait() == 130
    assert f"answers at {address}" in running.screen
    assert scalars(running.job, "explorer")["rollout/model_version"] == [0, 1]
    assert scalars(running.job, "trainer")["actor/first_ratio_max_deviation"] <= [1e-5] * 2
    assert running.remaining() == []
