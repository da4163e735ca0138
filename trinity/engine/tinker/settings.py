"""What a `TinkerEngine`, and whoever else talks to the Tinker service, is told."""

import os
from dataclasses import dataclass
from pathlib import Path

KEY_VARIABLES = ("TINKER_API_KEY", "TRINITY_API_KEY")
"""Where the key is looked for, in this order. It never enters a config or a log."""

_OTHER_VARIABLE = "TINKER_CREDENTIAL_CMD"
_STORED = "~/.tinker/credentials.json"


def key() -> str | None:
    """The key of the environment; None leaves it to the client, which knows further places."""
    return next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)


def has_key() -> bool:
    """Whether the client will find one: here, by the user's command, or as login stored it."""
    is_elsewhere = _OTHER_VARIABLE in os.environ or Path(_STORED).expanduser().is_file()
    return key() is not None or is_elsewhere


@dataclass(frozen=True)
class TinkerServiceSettings:
    """How to reach the service.

    Args:
        base_model: What the service calls the model that is sampled from or trained.
        base_url: Address of the service; None: that of TINKER_BASE_URL, else the client's own.
        timeout_s: Of one request, with all that the client tries again.
        start_timeout_s: Until the service must have answered for the first time.
    """

    base_model: str
    base_url: str | None = None
    timeout_s: float = 600.0
    start_timeout_s: float = 120.0


@dataclass(frozen=True)
class TinkerEngineSettings:
    """Settings of one engine.

    Args:
        service: Where the model is.
        tokenizer_path: Folder or hub name of the model here: tells which tokens end a text.
        max_model_len: Prompt and response tokens of one sequence; None: what the service allows.
        seed: Of requests that bring none.
        keeps_temperature: Refuse other temperatures than 1, at which the service trains, and 0: of
            requests that come from outside and are trained on.
    """

    service: TinkerServiceSettings
    tokenizer_path: str
    max_model_len: int | None = None
    seed: int = 42
    keeps_temperature: bool = False
