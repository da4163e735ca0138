"""Data-Juicer operators as one thing: the service, started if need be, and our session with it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity.buffer.rows import Row
from trinity.common.config.data_processor import OperatorConfig
from trinity.common.config.service import DataJuicerServiceConfig
from trinity.service.data_juicer.client import DataJuicerClient, Kind, process_of
from trinity.service.data_juicer.process import DataJuicerService
from trinity.utils.log import LOG_DIR_ENV
from trinity.utils.metrics import Metrics


class DataJuicerProcessor:
    """``prepare`` -> ``process_rows`` -> ``close``.

    Args:
        operators: Name and args of each, in order.
        config_path: A Data-Juicer recipe in place of ``operators``.
        service_config: Section `service.data_juicer`; None starts a service of our own.
        num_process: Processes the service may use for large sets of rows.
        kind: What the rows are.
    """

    def __init__(
        self,
        operators: Sequence[OperatorConfig | Mapping[str, Any]] = (),
        config_path: str | None = None,
        *,
        service_config: DataJuicerServiceConfig | Mapping[str, Any] | None = None,
        num_process: int = 4,
        kind: Kind = "task",
    ) -> None:
        if not isinstance(service_config, DataJuicerServiceConfig):
            service_config = DataJuicerServiceConfig(**(service_config or {"auto_start": True}))
        folder = os.environ.get(LOG_DIR_ENV)
        log = Path(folder) / "data_juicer.log" if folder else None
        process = process_of(operators, config_path)
        self._service = DataJuicerService(service_config, log)
        self._client = DataJuicerClient(
            self._service.url, process, kind=kind, num_process=num_process
        )

    @property
    def needs_all_rows(self) -> bool:
        """Whether an operator compares rows with each other."""
        return self._client.needs_all_rows

    def fingerprint(self) -> str:
        """The same text for the same operators."""
        return self._client.fingerprint()

    async def prepare(self) -> None:
        """Start the service, if it is ours and not up yet, and load the operators there."""
        await self._service.start()
        await self._client.prepare()

    async def process_rows(self, rows: Sequence[Row]) -> tuple[list[Row], Metrics]:
        """The rows that are left, with a column `stats` of what was found out about each."""
        return await self._client.process_rows(rows)

    async def close(self) -> None:
        """End the session, and the service if it is ours."""
        try:
            await self._client.close()
        finally:
            await self._service.stop()
