"""Reports go to the monitor in order, and no monitor holds up or ends a run."""

import logging
import threading
from pathlib import Path

import pytest

from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.root import Config
from trinity.launcher import reporter as subject
from trinity.launcher.reporter import Reporter
from trinity.utils.monitor import Monitor

LIMIT_S = 60.0


class Noting(Monitor):
    """Notes what it gets; waits for ``may_go`` before, and fails at ``bad`` steps."""

    def __init__(self, folder: Path, bad: tuple[int, ...] = ()) -> None:
        config = Config(monitor=MonitorConfig(cache_dir=str(folder)))
        super().__init__("project", "", "name", "trainer", config)
        self.bad = bad
        self.noted: list[object] = []
        self.may_go = threading.Event()

    def log(self, data, step, commit=False) -> None:
        assert self.may_go.wait(LIMIT_S)
        if step in self.bad:
            raise ConnectionError("no such host")
        self.noted.append((step, dict(data)))

    def log_table(self, table_name, df, step) -> None:
        self.noted.append((step, table_name, df.to_dict("records")))

    def close(self) -> None:
        self.noted.append("closed")


def reporter(monitor: Noting, heard: list[int] | None = None, end_s: float = LIMIT_S) -> Reporter:
    listener = lambda role, step, metrics: (heard if heard is not None else []).append(step)  # noqa: E731
    return Reporter(monitor, [listener], logging.getLogger("test"), end_s)


def test_a_slow_monitor_holds_nobody_up_and_gets_all_in_order(tmp_path: Path) -> None:
    monitor, heard = Noting(tmp_path), []
    reports = reporter(monitor, heard)
    metrics = {"loss": 1.0}
    for step in (1, 2, 3):
        reports.report("trainer", step, metrics)
    metrics["loss"] = 2.0
    reports.rows("rollouts", [{"reward": 1, "reply": "x"}, {"reward": 2}], 3)
    assert heard == [1, 2, 3] and monitor.noted == []
    monitor.may_go.set()
    reports.close()
    logged = [(step, {"loss": 1.0}) for step in (1, 2, 3)]
    absent = pytest.approx(float("nan"), nan_ok=True)
    rows = [{"reward": 1, "reply": "x"}, {"reward": 2, "reply": absent}]
    assert monitor.noted == [*logged, (3, "rollouts", rows), "closed"]


def test_a_monitor_that_fails_is_told_of_once_and_left_out(tmp_path: Path, caplog) -> None:
    monitor = Noting(tmp_path, bad=(2, 3))
    monitor.may_go.set()
    reports = reporter(monitor)
    for step in (1, 2, 3, 4):
        reports.report("trainer", step, {})
    reports.close()
    assert monitor.noted == [(1, {})]
    assert [r.message for r in caplog.records] == [
        "The monitor failed and is left out from here on: no such host"
    ]


def test_a_monitor_that_hangs_does_not_keep_a_run_from_its_end(tmp_path: Path, caplog) -> None:
    monitor = Noting(tmp_path)
    reports = reporter(monitor, end_s=0.01)
    reports.report("trainer", 1, {})
    reports.close()
    assert "does not end within 0.01 s" in caplog.text
    monitor.may_go.set()


def test_a_monitor_that_does_not_keep_up_is_left_out(
    tmp_path: Path, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "_MAX_WAITING", 3)
    monitor = Noting(tmp_path)
    reports = reporter(monitor)
    for step in range(10):
        reports.report("trainer", step, {})
    assert "is 3 reports behind" in caplog.text
    monitor.may_go.set()
    reports.close()
    assert "closed" not in monitor.noted
