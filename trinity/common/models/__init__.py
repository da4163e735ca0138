"""What a workflow's author sees of a model, and what an engine must offer."""

from trinity.common.models.protocol import (
    Completion,
    InferenceEngine,
    SamplingParams,
    WeightTicket,
)
from trinity.common.models.settings import ModelSettings
from trinity.common.models.wrapper import ModelWrapper

__all__ = [
    "Completion",
    "InferenceEngine",
    "ModelSettings",
    "ModelWrapper",
    "SamplingParams",
    "WeightTicket",
]
