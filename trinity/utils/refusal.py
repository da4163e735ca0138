"""What an HTTP service says when it refuses a request."""

import json


def reason_of(body: str) -> str:
    """The message in OpenAI's form of an error or in FastAPI's; a ``body`` of neither, whole."""
    try:
        told = json.loads(body)
        error = told["error"] if "error" in told else told["detail"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body
