"""Where metrics go: tensorboard, wandb, mlflow or swanlab, behind one face."""

import html
import importlib
import importlib.util
import inspect
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trinity.utils.registry import Registry
from trinity.utils.words import without_password

if TYPE_CHECKING:
    from pandas import DataFrame

_MLFLOW_BATCH = 1000  # metrics that a server takes at once
_MLFLOW_PARAMS = 100
_MLFLOW_PARAM_LENGTH = 6000
_MLFLOW_WORDS = {"@": "_at_", "<": "lt_", ">": "gt_"}
_NO_MLFLOW_LETTER = re.compile(r"[^\w/.\- ]")
_SECRET_NAME = re.compile(r"(^|[._])(api_?key|password|secret|access_token|auth_token)$", re.I)

MONITOR: "Registry[type[Monitor]]" = Registry(
    "monitor",
    {
        "tensorboard": "trinity.utils.monitor.TensorboardMonitor",
        "wandb": "trinity.utils.monitor.WandbMonitor",
        "mlflow": "trinity.utils.monitor.MlflowMonitor",
        "swanlab": "trinity.utils.monitor.SwanlabMonitor",
    },
)


class RunConfig(Protocol):
    """What a monitor needs of `trinity.common.config.Config`."""

    @property
    def monitor(self) -> Any: ...

    def flatten(self) -> dict[str, Any]: ...


class Monitor(ABC):
    """Receives the metrics of one role (explorer, trainer) of a run.

    Args:
        project, group, name: Of the run.
        role: "explorer", "trainer" or "benchmark"; the run is shown as ``<name>_<role>``.
        config: Of the run, whole.

    Attributes:
        folder: Where files of the monitor may lie (``<job>/monitor``).
        args: ``monitor.monitor_args`` over the defaults.
    """

    def __init__(
        self,
        project: str,
        group: str,
        name: str,
        role: str,
        config: RunConfig,
    ) -> None:
        self.project, self.group, self.name, self.role = project, group, name, role
        self.config = config
        self.folder = Path(config.monitor.cache_dir)
        self.args: dict[str, Any] = {**self.default_args(), **(config.monitor.monitor_args or {})}

    @classmethod
    def default_args(cls) -> dict[str, object]:
        """What ``monitor_args`` may hold, with its defaults."""
        return {}

    @classmethod
    def problem(cls, args: Mapping[str, object] | None = None) -> str | None:
        """Why this monitor can't work here and what to do, or None. Asked before the run starts."""
        return None

    @abstractmethod
    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        """Record ``data`` at ``step``."""

    @abstractmethod
    def log_table(self, table_name: str, df: "DataFrame", step: int) -> None:
        """Record a table."""

    @abstractmethod
    def close(self) -> None:
        """Flush and end."""


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """What is set, by dotted key, without what only its owner may know."""
    return {key: _shown(key, value) for key, value in config.flatten().items() if value is not None}


def _shown(key: str, value: Any) -> Any:
    if _SECRET_NAME.search(key):
        return "***"
    return without_password(value) if isinstance(value, str) else value


def _missing(module: str, extra: str) -> str | None:
    if importlib.util.find_spec(module) is not None:
        return None
    return (
        f"monitor_type {extra!r} needs the package {module!r}: pip install 'trinity-rft[{extra}]'."
    )


class TensorboardMonitor(Monitor):
    """Event files in ``<folder>/tensorboard/<role>``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # same signature
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder / "tensorboard" / self.role), flush_secs=10)

    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, table_name: str, df: "DataFrame", step: int) -> None:
        if df.empty:
            return
        head = [str(column) for column in df.columns]
        lines = [" | ".join(head), " | ".join("---" for _ in head)]
        lines += [" | ".join(_cell(value) for value in row) for row in _cells(df, "")]
        self._writer.add_text(table_name, "\n".join(f"| {line} |" for line in lines), step)

    def close(self) -> None:
        self._writer.close()


def _cells(df: "DataFrame", absent: object) -> list[list[object]]:
    """The rows of a table, with ``absent`` where one has no value."""
    found: list[list[object]] = df.astype(object).where(df.notna(), absent).to_numpy().tolist()
    return found


def _cell(value: object) -> str:
    """A value inside a Markdown table, as it is: replies are full of tags that would vanish."""
    return html.escape(str(value), quote=False).replace("|", "\\|").replace("\n", "<br>")


class WandbMonitor(Monitor):
    """A Weights & Biases run."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # same signature
        wandb = importlib.import_module("wandb")
        for key, variable in (("base_url", "WANDB_BASE_URL"), ("api_key", "WANDB_API_KEY")):
            if self.args[key]:
                os.environ[variable] = str(self.args[key])
        self._wandb = wandb
        self._run = wandb.init(
            project=self.project,
            group=self.group or self.name,
            name=f"{self.name}_{self.role}",
            dir=str(self.folder),
            config=hyperparameters(self.config),
            reinit="create_new",
        )

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"base_url": None, "api_key": None}

    @classmethod
    def problem(cls, args: Mapping[str, object] | None = None) -> str | None:
        missing = _missing("wandb", "wandb")
        netrc = Path.home() / ".netrc"
        has_key = (args or {}).get("api_key") or os.environ.get("WANDB_API_KEY") or netrc.exists()
        if missing or has_key or os.environ.get("WANDB_MODE") in ("offline", "disabled"):
            return missing
        return (
            "monitor_type is 'wandb', but no API key is set: export WANDB_API_KEY=<your key> "
            "before the run, or set monitor.monitor_type to tensorboard or mlflow."
        )

    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        self._run.log(dict(data), step=step, commit=commit)

    def log_table(self, table_name: str, df: "DataFrame", step: int) -> None:
        table = self._wandb.Table(columns=[str(c) for c in df.columns], data=_cells(df, None))
        self._run.log({table_name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowMonitor(Monitor):
    """A run on an MLflow server."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # same signature
        mlflow = importlib.import_module("mlflow")
        for key in ("username", "password"):
            if self.args[key]:
                os.environ[f"MLFLOW_TRACKING_{key.upper()}"] = str(self.args[key])
        self._client = mlflow.MlflowClient(tracking_uri=str(self.args["uri"]))
        experiment = self._client.get_experiment_by_name(self.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self.project)
        )
        run = self._client.create_run(experiment_id, run_name=f"{self.name}_{self.role}")
        self._run_id = run.info.run_id
        self._metric = mlflow.entities.Metric
        given = [
            mlflow.entities.Param(_mlflow_name(key), str(value)[:_MLFLOW_PARAM_LENGTH])
            for key, value in hyperparameters(self.config).items()
        ]
        for start in range(0, len(given), _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=given[start : start + _MLFLOW_PARAMS])

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"uri": "http://localhost:5000", "username": None, "password": None}

    @classmethod
    def problem(cls, args: Mapping[str, object] | None = None) -> str | None:
        return _missing("mlflow", "mlflow")

    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [
            self._metric(_mlflow_name(name), float(value), now_ms, step)
            for name, value in data.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, metrics[start : start + _MLFLOW_BATCH])

    def log_table(self, table_name: str, df: "DataFrame", step: int) -> None:
        self._client.log_table(self._run_id, df, artifact_file=f"{table_name}/{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """``name`` in the letters that a server takes; it refuses the whole batch for another."""
    for sign, word in _MLFLOW_WORDS.items():
        name = name.replace(sign, word)
    return _NO_MLFLOW_LETTER.sub("_", name)


class SwanlabMonitor(Monitor):
    """A SwanLab run."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # same signature
        swanlab = importlib.import_module("swanlab")
        options = {key: value for key, value in self.args.items() if value is not None}
        api_key = options.pop("api_key", None) or os.environ.get("SWANLAB_API_KEY")
        if api_key:
            swanlab.login(api_key=api_key)
        options.setdefault("experiment_name", f"{self.name}_{self.role}")
        options.setdefault("logdir", str(self.folder / "swanlab"))
        self._swanlab = swanlab
        given = hyperparameters(self.config)
        self._run = swanlab.init(project=self.project, config=given, **options)

    @classmethod
    def default_args(cls) -> dict[str, object]:
        names = (
            "api_key workspace experiment_name description tags logdir settings id resume reinit"
        )
        return {**dict.fromkeys(names.split()), "mode": "cloud"}

    @classmethod
    def problem(cls, args: Mapping[str, object] | None = None) -> str | None:
        return _missing("swanlab", "swanlab")

    def log(self, data: Mapping[str, float], step: int, commit: bool = False) -> None:
        self._run.log(dict(data), step=step)

    def log_table(self, table_name: str, df: "DataFrame", step: int) -> None:
        table = self._swanlab.echarts.Table()
        rows = [[str(value) for value in row] for row in _cells(df, None)]
        table.add([str(column) for column in df.columns], rows)
        self._run.log({table_name: table}, step=step)

    def close(self) -> None:
        self._run.finish()


def check_monitor_args(kind: str, args: Mapping[str, object] | None) -> str | None:
    """What is wrong with ``monitor_type`` and ``monitor_args``, in one sentence, or None."""
    monitor = MONITOR.get(kind)
    assert inspect.isclass(monitor)
    unknown = sorted(set(args or {}) - set(monitor.default_args()))
    if unknown:
        known = ", ".join(monitor.default_args()) or "nothing"
        return (
            f"monitor_args has {', '.join(unknown)}, which {kind} doesn't take: It takes {known}."
        )
    return monitor.problem(args)
