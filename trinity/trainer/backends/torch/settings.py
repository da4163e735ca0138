"""What a `TorchTrainEngine` has to know: plain values, no sections of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings


@dataclass(frozen=True)
class TorchEngineSettings:
    """Models, optimizers and how to compute.

    Args:
        model_path: Model folder (or hub name) of the actor, and of the frozen reference.
        dtype: What models compute in: "bfloat16" or "float32". Masters are float32 in both.
        seed: Of random weights, where the folder has none, and of the engine's random numbers.
        temperature: Of the distribution that samples come from; logprobs are taken there.
        optimizer: The actor's.
        micro_batches: Size of a micro-batch.
        shares_prefixes: Compute what the rows of a group begin with alike once.
        gradient_checkpointing: Compute activations again in the backward pass: less memory.
        device: Where models are.
        trust_remote_code: Run code that comes with the model.
        config_overrides: Fields of the model's config to replace (``rope_theta`` ...).
        chat_template: Written into saved models in place of the tokenizer's own; None keeps that.
        num_threads: Cores to compute on; None: as PyTorch finds.
    """

    model_path: str
    dtype: str = "bfloat16"
    seed: int = 42
    temperature: float = 1.0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    micro_batches: MicroBatchRule = field(default_factory=MicroBatchRule)
    shares_prefixes: bool = True
    gradient_checkpointing: bool = False
    device: str = "cpu"
    trust_remote_code: bool = False
    config_overrides: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    num_threads: int | None = None
