"""Rows to the Data-Juicer service and back."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from trinity.buffer.rows import Row
from trinity.common.config.data_processor import OperatorConfig
from trinity.common.errors import DeadlineError, TrinityError
from trinity.utils.metrics import Metrics

Kind = Literal["task", "experience"]
_COMPARING = ("deduplicator", "selector")  # ends of the names of operators that compare rows


class DataJuicerError(TrinityError):
    """The service can't be reached, or an operator failed there."""


class DataJuicerClient:
    """A list of operators at the service. ``prepare`` -> ``process_rows`` -> ``close``.

    Args:
        url: Address of the service.
        process: Operators as in a recipe.
        kind: What the rows are.
        num_process: Processes the service may use for large sets of rows.
        start_timeout_s: Seconds to wait for the service to answer.
        timeout_s: Seconds one request may take.
    """

    def __init__(
        self,
        url: str,
        process: Sequence[Mapping[str, Mapping[str, Any] | None]],
        *,
        kind: Kind = "task",
        num_process: int = 4,
        start_timeout_s: float = 120.0,
        timeout_s: float = 3600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.process = [dict(step) for step in process]
        self.kind = kind
        self.num_process = num_process
        self.start_timeout_s = start_timeout_s
        self.timeout_s = timeout_s
        self._session: str | None = None

    @property
    def needs_all_rows(self) -> bool:
        """Whether an operator compares rows with each other."""
        return any(name.endswith(_COMPARING) for step in self.process for name in step)

    def fingerprint(self) -> str:
        """The same text for the same operators."""
        return json.dumps(self.process, sort_keys=True)

    async def prepare(self) -> None:
        """Wait for the service and load the operators there.

        Raises:
            DeadlineError: It doesn't answer.
            DataJuicerError: An operator doesn't exist, or can't be loaded.
        """
        deadline = time.monotonic() + self.start_timeout_s
        while not await self.is_healthy():
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the Data-Juicer service at {self.url}",
                    "its start",
                    self.start_timeout_s,
                    "Start it, or set service.data_juicer.auto_start.",
                )
            await asyncio.sleep(0.3)
        request = {"process": self.process, "num_process": self.num_process}
        self._session = str((await self._post("/create", request))["session"])

    async def is_healthy(self) -> bool:
        """Whether the service answers."""
        return await asyncio.to_thread(self._get_health)

    def _get_health(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return json.load(answer).get("status") == "ok"
        except (OSError, ValueError, HTTPException):
            return False

    async def process_rows(self, rows: Sequence[Row]) -> tuple[list[Row], Metrics]:
        """The rows that are left, with a column `stats` of what was found out about each."""
        if self._session is None:
            await self.prepare()
        request = {"session": self._session, "rows": list(rows)}
        answer = await self._post(f"/process_{self.kind}", request)
        return answer["rows"], answer["metrics"]

    async def close(self) -> None:
        """Forget the operators at the service."""
        if self._session is not None and await self.is_healthy():
            await self._post("/close", {"session": self._session})
        self._session = None

    async def _post(self, path: str, value: object) -> dict[str, Any]:
        body = json.dumps(value, default=str).encode()
        return await asyncio.to_thread(self._send, path, body)

    def _send(self, path: str, body: bytes) -> dict[str, Any]:
        request = Request(
            f"{self.url}{path}", body, {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urlopen(request, timeout=self.timeout_s) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except HTTPError as error:
            raise DataJuicerError(f"Data-Juicer: {_reason(error)}") from None
        except (URLError, HTTPException, OSError) as error:
            raise DataJuicerError(
                f"The Data-Juicer service at {self.url} broke off: {error}"
            ) from error


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError):
        return str(error)


def process_of(
    operators: Sequence[OperatorConfig | Mapping[str, Any]], config_path: str | None
) -> list[dict[str, Any]]:
    """The operators of a config section, or of a Data-Juicer recipe (a YAML file).

    Raises:
        DataJuicerError: The recipe can't be read, or there are no operators at all.
    """
    if config_path:
        return _of_recipe(config_path)
    if not operators:
        raise DataJuicerError("Data-Juicer has no operators: set `operators` or `config_path`.")
    named = [op if isinstance(op, OperatorConfig) else OperatorConfig(**op) for op in operators]
    return [{op.name: op.args} for op in named]


def _of_recipe(path: str) -> list[dict[str, Any]]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, OmegaConfBaseException, ValueError) as error:
        raise DataJuicerError(f"The recipe {path!r} can't be read: {error}") from None
    process = recipe.get("process") if isinstance(recipe, dict) else None
    if not isinstance(process, list) or not process:
        raise DataJuicerError(f"The recipe {path!r} has no list `process` of operators.")
    return process
