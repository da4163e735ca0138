"""The `trainer:` section: what computes gradients, and what it saves."""

from typing import Any, Literal

from pydantic import Field

from trinity.common.config.base import ConfigModel
from trinity.common.constants import (
    OnSaveError,
    SaveHF,
    SaveStrategy,
    TrainerStrategy,
    TrainerType,
)


class MegatronConfig(ConfigModel):
    """Parallelism of `trainer_strategy: megatron` (with `trainer_type: verl`)."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """GPUs that share each matrix."""

    pipeline_model_parallel_size: int = Field(1, ge=1)
    """GPUs that share the layers."""

    virtual_pipeline_model_parallel_size: int | None = Field(None, ge=1)
    """Chunks of layers on each pipeline stage. Unset: one."""

    expert_model_parallel_size: int = Field(1, ge=1)
    """GPUs that share the experts of a mixture-of-experts model."""

    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """GPUs that share each expert's matrices. Unset: Megatron's default."""

    context_parallel_size: int = Field(1, ge=1)
    """GPUs that share each sequence."""

    sequence_parallel: bool = True
    """Split norms and dropouts along the sequence over tensor parallel GPUs."""


class TrainerConfig(ConfigModel):
    """What computes gradients, and what it saves."""

    name: str = "trainer"
    """Name of the trainer; its log and its processes carry it."""

    trainer_type: TrainerType = TrainerType.TORCH
    """Backend: `torch` (built in), `verl` or `tinker`."""

    trainer_strategy: TrainerStrategy = TrainerStrategy.FSDP
    """How the model is spread over GPUs: `fsdp`, `fsdp2` (the same with `torch`) or `megatron`."""

    num_processes: int = Field(1, ge=1)
    """Processes that share the model on a machine without GPUs; with GPUs there is one for each."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format of the computation; master weights are float32 either way."""

    total_steps: int | None = Field(None, ge=1)
    """Optimizer batches after which training ends. Unset: when the data ends."""

    save_interval: int = Field(0, ge=0)
    """Training steps between two checkpoints; 0 saves at the end only."""

    save_strategy: SaveStrategy = SaveStrategy.UNRESTRICTED
    """Checkpoint writers that may work at once: `single_thread`, `single_process`,
    `single_node` or `unrestricted`."""

    save_hf_checkpoint: SaveHF = SaveHF.LAST
    """Which checkpoints also get Hugging Face files: `last`, `always` or `never`."""

    max_checkpoints_to_keep: int = Field(0, ge=0)
    """Newest checkpoints that are kept; 0 keeps all."""

    on_save_error: OnSaveError = OnSaveError.STOP
    """What a failed save does to the run: `stop` or `continue` (and try again next time)."""

    enable_preview: bool = False
    """Log a few training samples as a table at every sync."""

    grad_clip: float = Field(1.0, gt=0)
    """Largest gradient norm; longer gradients are scaled down to it."""

    ppo_epochs: int = Field(1, ge=1)
    """Times each batch is gone through."""

    mini_batch_size: int | None = Field(None, ge=1)
    """Experiences of one optimizer step. Unset: all of a training step
    (`buffer.train_batch_size`)."""

    critic_warmup: int = Field(0, ge=0)
    """First training steps in which only the critic learns."""

    use_dynamic_bsz: bool = True
    """Fill micro-batches up to `max_token_len_per_gpu` tokens instead of a fixed row count."""

    max_token_len_per_gpu: int | None = Field(None, ge=1)
    """Tokens in one micro-batch on one GPU. Unset: twice `model.max_model_len`, divided by
    the sequence parallel size."""

    use_remove_padding: bool = True
    """Pack sequences without padding."""

    use_torch_compile: bool | None = None
    """Compile the model's layers on a GPU: about a quarter more tokens a second, and some ten
    seconds more for the first step. Unset: where all weights are trained, and each GPU has rows of
    its own (`ulysses_sequence_parallel_size` 1)."""

    enable_shared_prefix: bool = True
    """Compute the prompt of a group once for all its samples where that is faster."""

    balance_batch: bool = True
    """Give each GPU about the same number of tokens."""

    ulysses_sequence_parallel_size: int = Field(1, ge=1)
    """GPUs that share each sequence."""

    enable_gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them: less memory, about a third more time."""

    param_offload: bool = False
    """Keep parameters in CPU memory while they are not used."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory while it is not used."""

    grad_offload: bool = False
    """Keep gradients in CPU memory while they are not used (verl with Megatron)."""

    offload_policy: bool = False
    """Keep parameters, gradients and optimizer state in CPU memory while they are not used."""

    fix_actor_microbatch_loss_scale: bool = True
    """The loss does not depend on how a batch is split; only true is accepted."""

    megatron: MegatronConfig = MegatronConfig()
    """Parallelism of `trainer_strategy: megatron`."""

    trust_remote_code: bool = False
    """Allow Python code that comes with the model to run in the trainer."""

    trainer_config: dict[str, Any] = {}
    """veRL's own settings, wrapped in `actor_rollout_ref`, `critic`, `trainer`, or flat.
    Which key does what is listed in docs/verl_keys.md."""
