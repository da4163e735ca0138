import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trinity.common.config.monitor import MonitorConfig
from trinity.common.config.root import Config
from trinity.utils.monitor import MONITOR, Monitor, check_monitor_args, hyperparameters

RUN = ("project", "group", "name", "trainer")


def config_of(folder: Path, **args: object) -> Config:
    return Config(monitor=MonitorConfig(cache_dir=str(folder), monitor_args=args or None))


def make(kind: str, folder: Path, **args: object) -> Monitor:
    return MONITOR.get(kind)(*RUN, config_of(folder, **args))


def frame(rows: list[dict[str, object]]) -> pandas.DataFrame:
    return pandas.DataFrame(rows, dtype=object)


def test_hyperparameters_are_what_is_set_without_secrets(tmp_path: Path) -> None:
    config = config_of(tmp_path, api_key="k1", password="k2", base_url="http://me:k3@here/x")
    config.explorer.rollout_model.api_key = "k4"
    config.algorithm.optimizer.lr = 1e-5
    found = hyperparameters(config)
    assert found["monitor.monitor_args.base_url"] == "http://me:***@here/x"
    assert found["algorithm.optimizer.lr"] == 1e-5
    assert not any(
        f"k{i}" == str(value) or f"k{i}@" in str(value)
        for i in (1, 2, 3, 4)
        for value in found.values()
    )
    assert {key for key, value in found.items() if value == "***"} == {
        "monitor.monitor_args.api_key",
        "monitor.monitor_args.password",
        "explorer.rollout_model.api_key",
    }
    assert None not in found.values()


def test_tensorboard_keeps_every_number(tmp_path: Path) -> None:
    monitor = make("tensorboard", tmp_path)
    monitor.log({"a/b": 1.5, "c": 2}, step=1)
    monitor.log({"a/b": 2.5}, step=2, commit=True)
    rows: list[dict[str, object]] = [{"x": "<think>1|2\n3</think>", "y": 1}, {"x": "z"}]
    monitor.log_table("rollout_examples", frame(rows), step=2)
    monitor.log_table("empty", frame([]), step=2)
    monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "trainer")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("a/b")] == [(1, 1.5), (2, 2.5)]
    [table] = events.Tensors("rollout_examples/text_summary")
    text = table.tensor_proto.string_val[0].decode()
    assert text.splitlines() == [
        "| x | y |",
        "| --- | --- |",
        "| &lt;think&gt;1\\|2<br>3&lt;/think&gt; | 1 |",
        "| z |  |",
    ]


class Recorder:
    """Keeps the calls made to it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []

    def note(self, name: str, result: object = None):
        def call(*args: object, **kwargs: object) -> object:
            self.calls.append((name, args, kwargs))
            return result

        return call

    def of(self, name: str) -> list[tuple[tuple, dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def _fake_wandb(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> Iterator[None]:
    run = SimpleNamespace(log=recorder.note("log"), finish=recorder.note("finish"))
    init, table = recorder.note("init", run), recorder.note("Table", "a table")
    install(monkeypatch, "wandb", init=init, Table=table)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.setenv(name, "")
    yield


@pytest.mark.usefixtures("_fake_wandb")
def test_wandb(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = make("wandb", tmp_path, api_key="secret", base_url="http://here")
    monitor.log({"a": 1.0}, step=3, commit=True)
    monitor.log_table("t", frame([{"x": 1, "y": 2}, {"x": 3}]), step=3)
    monitor.close()
    [(_, init)] = recorder.of("init")
    assert (init["project"], init["group"], init["name"]) == ("project", "group", "name_trainer")
    assert init["config"]["algorithm.algorithm_type"] == Config().algorithm.algorithm_type
    assert "secret" not in init["config"].values()
    assert (os.environ["WANDB_API_KEY"], os.environ["WANDB_BASE_URL"]) == ("secret", "http://here")
    assert recorder.of("log")[0] == (({"a": 1.0},), {"step": 3, "commit": True})
    assert recorder.of("Table")[0][1] == {"columns": ["x", "y"], "data": [[1, 2], [3, None]]}
    assert recorder.of("finish")


@pytest.mark.usefixtures("_fake_wandb")
def test_wandb_without_a_key_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "WANDB_API_KEY" in (check_monitor_args("wandb", None) or "")
    assert check_monitor_args("wandb", {"api_key": "x"}) is None
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert check_monitor_args("wandb", None) is None


def test_mlflow(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(
        get_experiment_by_name=recorder.note("get", None),
        create_experiment=recorder.note("create", "7"),
        create_run=recorder.note("run", SimpleNamespace(info=SimpleNamespace(run_id="r"))),
        log_batch=recorder.note("log_batch"),
        log_table=recorder.note("log_table"),
        set_terminated=recorder.note("end"),
    )
    entities = SimpleNamespace(Metric=lambda *args: args, Param=lambda *args: args)
    opened = recorder.note("client", client)
    install(monkeypatch, "mlflow", MlflowClient=opened, entities=entities)
    monitor = make("mlflow", tmp_path, uri="http://there")
    monitor.log({f"m{i}/mean@4": float(i) for i in range(1001)}, step=2)
    monitor.log({"selection/<1_ratio": 0.5, "selection/>1_16_ratio": 0.5, "acc (%):x": 1.0}, step=3)
    monitor.log_table("t", frame([{"x": 1}]), step=2)
    monitor.close()
    assert recorder.of("client")[0][1] == {"tracking_uri": "http://there"}
    assert recorder.of("run")[0] == (("7",), {"run_name": "name_trainer"})
    params = [kwargs["params"] for _, kwargs in recorder.of("log_batch") if kwargs]
    given = {name: value for batch in params for name, value in batch}
    assert given["algorithm.optimizer.lr"] == str(Config().algorithm.optimizer.lr)
    assert len(params) > 1 and max(map(len, params)) == 100
    batches = [args[1] for args, kwargs in recorder.of("log_batch") if not kwargs]
    assert [len(batch) for batch in batches] == [1000, 1, 3]
    # What a server takes; it refuses the whole batch for one other letter.
    taken = ["selection/lt_1_ratio", "selection/gt_1_16_ratio", "acc ____x"]
    assert [name for name, *_ in batches[2]] == taken
    name, value, _, step = batches[0][3]
    assert (name, value, step) == ("m3/mean_at_4", 3.0, 2)
    assert recorder.of("log_table")[0][0][1].to_dict("list") == {"x": [1]}
    assert recorder.of("end") == [(("r",), {})]


def test_swanlab(tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(log=recorder.note("log"), finish=recorder.note("finish"))
    table = SimpleNamespace(add=recorder.note("add"))
    install(
        monkeypatch,
        "swanlab",
        init=recorder.note("init", run),
        login=recorder.note("login"),
        echarts=SimpleNamespace(Table=lambda: table),
    )
    monitor = make("swanlab", tmp_path, api_key="k", workspace="w")
    monitor.log({"a": 1.0}, step=1)
    monitor.log_table("t", frame([{"x": 1}]), step=1)
    monitor.close()
    assert recorder.of("login") == [((), {"api_key": "k"})]
    [(_, init)] = recorder.of("init")
    assert init["workspace"] == "w" and init["experiment_name"] == "name_trainer"
    assert init["mode"] == "cloud" and "description" not in init
    assert init["config"]["monitor.monitor_args.api_key"] == "***"
    assert recorder.of("add") == [((["x"], [["1"]]), {})]


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "swanlab"])
def test_an_absent_package_names_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, kind, raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    assert f"trinity-rft[{kind}]" in (check_monitor_args(kind, None) or "")


def test_unknown_arguments_are_named() -> None:
    problem = check_monitor_args("mlflow", {"url": "x"})
    assert problem == (
        "monitor_args has url, which mlflow doesn't take: It takes uri, username, password."
    )
    assert "It takes nothing." in (check_monitor_args("tensorboard", {"x": 1}) or "")
    assert check_monitor_args("tensorboard", None) is None
