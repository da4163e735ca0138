"""The `algorithm:` section: what is optimised and how fast."""

from typing import Any, Literal, get_args

from pydantic import Field

from trinity.common.config.base import ConfigModel
from trinity.common.constants import LRScheduler

LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


class OptimizerConfig(ConfigModel):
    """The actor's optimizer."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate after warm-up."""

    lr_warmup_steps: int = Field(-1, ge=-1)
    """Optimizer steps of linear warm-up; -1 takes `lr_warmup_steps_ratio`."""

    lr_warmup_steps_ratio: float = Field(0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps, where `lr_warmup_steps` is -1."""

    min_lr_ratio: float = Field(0.01, ge=0, le=1)
    """Learning rate at the end of a cosine, as a share of `lr`."""

    lr_scheduler_type: LRScheduler = LRScheduler.CONSTANT
    """Shape after warm-up: `constant` or `cosine`."""

    optimizer_type: Literal["adam", "adamw"] = "adam"
    """Optimizer: `adam` and `adamw` are both Adam with decoupled weight decay."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's two moving averages."""

    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay, per step and unit of learning rate."""

    clip_grad: float = Field(1.0, gt=0)
    """Largest gradient norm; another name of `trainer.grad_clip`."""


class AlgorithmConfig(ConfigModel):
    """What is optimised and how fast. Unset parts come from `algorithm_type`."""

    algorithm_type: str = "ppo"
    """Algorithm by its registered name; it sets the defaults of all fields below."""

    repeat_times: int | None = Field(None, ge=1)
    """Samples of each task. Unset: by algorithm (grpo 2, mix 8, dapo 16, dpo always 2, ...)."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """The actor's optimizer."""

    sample_strategy: str | None = None
    """How batches are read from the buffer: `default`, `staleness_control` or `mix`."""

    sample_strategy_args: dict[str, Any] | None = None
    """Arguments of `sample_strategy`, merged over its defaults."""

    advantage_fn: str | None = None
    """Advantage function by its registered name."""

    advantage_fn_args: dict[str, Any] | None = None
    """Arguments of `advantage_fn`, merged over its defaults."""

    kl_penalty_fn: str | None = None
    """KL estimate that is taken off the reward of every token; `none` for no penalty. Needs an
    advantage of the trainer, such as `grpo_verl`: others are taken before the KL is known."""

    kl_penalty_fn_args: dict[str, Any] | None = None
    """Arguments of `kl_penalty_fn`, merged over its defaults."""

    policy_loss_fn: str | None = None
    """Policy loss by its registered name."""

    policy_loss_fn_args: dict[str, Any] | None = None
    """Arguments of `policy_loss_fn`, merged over its defaults."""

    kl_loss_fn: str | None = None
    """KL estimate that is added to the loss; `none` for no KL loss."""

    kl_loss_fn_args: dict[str, Any] | None = None
    """Arguments of `kl_loss_fn`, merged over its defaults."""

    entropy_loss_fn: str | None = None
    """Entropy bonus that is taken off the loss; `none` for no bonus."""

    entropy_loss_fn_args: dict[str, Any] | None = None
    """Arguments of `entropy_loss_fn`, merged over its defaults."""

    loss_agg_mode: LossAggMode | None = None
    """How per-token losses become one number. Unset: by policy loss, mostly `token-mean`."""

    enable_router_replay: bool = False
    """Train mixture-of-experts models with the routes taken in the rollout."""

    bypass_old_logprobs: bool = True
    """Take the engine's logprobs as old logprobs; false recomputes them in the trainer."""

    rollout_correction: dict[str, Any] | None = None
    """Importance weights for the gap between engine and trainer; null for none."""
