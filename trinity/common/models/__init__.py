"""What a workflow's author sees of a model, and what an engine must offer."""

from trinity.common.models.protocol import (
    Completion,
    InferenceEngine,
    SamplingParams,
    WeightTicket,
)

__all__ = ["Completion", "InferenceEngine", "SamplingParams", "WeightTicket"]
