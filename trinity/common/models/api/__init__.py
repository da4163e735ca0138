"""The OpenAI-compatible face of a `ModelWrapper`: app, server and clients."""

from trinity.common.models.api.one_model import OneModel
from trinity.common.models.api.server import ApiServer, serve_model

__all__ = ["ApiServer", "OneModel", "serve_model"]
