"""The trainer's settings against each other and against veRL's."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import ROLLOUT, VERL, Wrong, at

CASES = [
    at(
        "Megatron without veRL",
        "trainer.trainer_strategy",
        "megatron",
        "`trainer_strategy: fsdp2`",
        "fsdp2",
    ),
    Wrong(
        "experts prescribed to veRL",
        {"algorithm.enable_router_replay": True, "trainer.trainer_type": "verl"},
        "algorithm.enable_router_replay",
        "`trainer.trainer_type: torch`",
        {"trainer.trainer_type": DROP},
    ),
    Wrong(
        "compiled layers with experts prescribed",
        {"algorithm.enable_router_replay": True, "trainer.use_torch_compile": True},
        "trainer.use_torch_compile",
        "or `algorithm.enable_router_replay`",
        {"trainer.use_torch_compile": DROP},
    ),
    Wrong(
        "experts of a service",
        {
            f"{ROLLOUT}.enable_return_routed_experts": True,
            "mode": "explore",
            f"{ROLLOUT}.engine_type": "openai",
        },
        f"{ROLLOUT}.enable_return_routed_experts",
        "`explorer.rollout_model.engine_type: torch`",
        {f"{ROLLOUT}.enable_return_routed_experts": False},
    ),
    Wrong(
        "two gradient norms",
        {"trainer.grad_clip": 1.0, f"{VERL}.actor.grad_clip": 0.5},
        f"{VERL}.actor.grad_clip",
        "Remove one",
        {f"{VERL}.actor.grad_clip": 1.0},
    ),
    Wrong(
        "kernels of veRL",
        {f"{VERL}.model.use_fused_kernels": True},
        f"{VERL}.model.use_fused_kernels",
        "`trainer_type: verl`",
        {"trainer.trainer_type": "verl"},
    ),
    Wrong(
        "mini-batches that do not fill a step",
        {"trainer.mini_batch_size": 12, "buffer.train_batch_size": 64},
        "trainer.mini_batch_size",
        "one of 4, 8, 16, or `buffer.train_batch_size` to 60",
        {"trainer.mini_batch_size": 16},
    ),
]
