"""What an `OpenAIEngine` is told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenAIEngineSettings:
    """Settings of one outside service.

    Args:
        model: What the service calls the model.
        base_url_env, api_key_env: Environment variables that hold the service's address (with
            ``/v1``) and key. The values never enter a config or a log.
        max_retries: Tries after the first, where the service is busy, down or out of reach.
        first_wait_s: Wait before the second try; doubled each time, unless the service says.
        max_requests_per_minute: None: as many as come.
        max_concurrent: Requests under way at a time.
        timeout_s: Of one request.
    """

    model: str
    base_url_env: str = "OPENAI_BASE_URL"
    api_key_env: str = "OPENAI_API_KEY"
    max_retries: int = 6
    first_wait_s: float = 1.0
    max_requests_per_minute: float | None = None
    max_concurrent: int = 64
    timeout_s: float = 600.0
