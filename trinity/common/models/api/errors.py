"""`ApiError`: what a route raises to refuse a request."""


class ApiError(Exception):
    """Becomes an answer with this status and OpenAI's form of an error."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
