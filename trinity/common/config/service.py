"""The `service:` section: side services a run may use."""

from pydantic import Field

from trinity.common.config.base import ConfigModel


class DataJuicerServiceConfig(ConfigModel):
    """The Data-Juicer service that cleans and scores data."""

    server_url: str | None = None
    """Address of a running service, such as `http://127.0.0.1:5005`."""

    auto_start: bool = False
    """Start the service with the run and stop it at the end."""

    port: int | None = Field(None, ge=1, le=65535)
    """TCP port of the service that `auto_start` starts. Unset: 5005."""


class ServiceConfig(ConfigModel):
    """Side services a run may use."""

    data_juicer: DataJuicerServiceConfig | None = None
    """The Data-Juicer service; null if none of the pipelines needs it."""
