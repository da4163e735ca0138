"""`ApiError`: what a route raises to refuse a request."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's code of a conversation that is too long for the model."""


class ApiError(Exception):
    """Becomes an answer with this status and OpenAI's form of an error."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code = status, kind, code
