"""What each algorithm type is made of, as plain data. `trinity.algorithm` makes classes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trinity.common.constants import Mode

Schema = Literal["experience", "sft", "dpo", "cpt"]
ONLINE = frozenset(Mode)
OFFLINE = frozenset({Mode.TRAIN})


@dataclass(frozen=True)
class AlgorithmSpec:
    """Defaults of one algorithm type; a user's value in the file wins over each.

    Args:
        advantage_fn: None where the loss takes no advantage.
        repeat_times: Samples of each task where the file says nothing.
        min_repeat_times: Fewest samples with which the advantage means anything.
        use_critic: Whether a value model is trained along.
        use_reference: Whether the KL terms compare with a frozen reference model.
        compute_advantage_in_trainer: Whether it needs what only the trainer has (values,
            recomputed logprobs), rather than a group of finished experiences.
        can_balance_batch: For plugins that look at it; pairs of rows stay together on any GPU.
        schema: What a row of the trainer's data is.
        modes: Modes in which it can run.
        fixed_repeat_times: Whether any other ``repeat_times`` is an error.
    """

    advantage_fn: str | None = "grpo"
    policy_loss_fn: str = "ppo"
    kl_loss_fn: str = "k2"
    kl_penalty_fn: str = "none"
    entropy_loss_fn: str = "default"
    sample_strategy: str = "default"
    repeat_times: int = 2
    min_repeat_times: int = 2
    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: Schema = "experience"
    modes: frozenset[Mode] = ONLINE
    loss_agg_mode: str = "token-mean"
    fixed_repeat_times: bool = False


_PLAIN = {"kl_loss_fn": "none", "use_reference": False}
_BARE = {"kl_loss_fn": "none", "entropy_loss_fn": "none", "use_reference": False}
_MIX = {"entropy_loss_fn": "mix", "sample_strategy": "mix", "repeat_times": 8}
_ANY_COUNT = {"repeat_times": 1, "min_repeat_times": 1}
_SFT_LOSS = {"advantage_fn": None, "policy_loss_fn": "sft", **_BARE, **_ANY_COUNT}


def _spec(*groups: Mapping[str, object], **fields: object) -> AlgorithmSpec:
    merged = {key: value for group in groups for key, value in group.items()}
    return AlgorithmSpec(**{**merged, **fields})  # type: ignore[arg-type]


ALGORITHMS: dict[str, AlgorithmSpec] = {
    "ppo": _spec(
        _ANY_COUNT, advantage_fn="ppo", use_critic=True, compute_advantage_in_trainer=True
    ),
    "grpo": AlgorithmSpec(),
    "dapo": _spec(_PLAIN, repeat_times=16),
    "reinforceplusplus": AlgorithmSpec(
        advantage_fn="reinforceplusplus", min_repeat_times=1, compute_advantage_in_trainer=True
    ),
    "rloo": AlgorithmSpec(advantage_fn="rloo", compute_advantage_in_trainer=True),
    "opmd": AlgorithmSpec(advantage_fn="opmd", policy_loss_fn="opmd"),
    "asymre": _spec(_BARE, advantage_fn="asymre", policy_loss_fn="opmd"),
    "topr": AlgorithmSpec(advantage_fn="reinforce", policy_loss_fn="topr", min_repeat_times=1),
    "cispo": AlgorithmSpec(policy_loss_fn="cispo"),
    "gspo": AlgorithmSpec(policy_loss_fn="gspo", loss_agg_mode="seq-mean-token-mean"),
    "sapo": AlgorithmSpec(policy_loss_fn="sapo"),
    "rec": AlgorithmSpec(advantage_fn="rec", policy_loss_fn="rec"),
    "sppo": _spec(_BARE, advantage_fn="opmd", policy_loss_fn="sppo"),
    "mix": _spec(_MIX, policy_loss_fn="mix"),
    "mix_chord": _spec(_MIX, policy_loss_fn="mix_chord"),
    "raft": _spec(_SFT_LOSS),
    "multi_step_grpo": AlgorithmSpec(advantage_fn="step_wise_grpo", repeat_times=8),
    "gigpo": AlgorithmSpec(advantage_fn="gigpo", repeat_times=8),
    "on_policy_distill": _spec(
        _BARE,
        advantage_fn="on_policy_distill",
        repeat_times=8,
        min_repeat_times=1,
        compute_advantage_in_trainer=True,
    ),
    "jsd": _spec(
        _BARE,
        advantage_fn="jsd",
        repeat_times=8,
        min_repeat_times=1,
        compute_advantage_in_trainer=True,
    ),
    "grpo_verl": AlgorithmSpec(advantage_fn="grpo_verl", compute_advantage_in_trainer=True),
    "sft": _spec(_SFT_LOSS, schema="sft", modes=OFFLINE),
    "cpt": _spec(_SFT_LOSS, schema="cpt", modes=OFFLINE),
    "dpo": AlgorithmSpec(
        advantage_fn=None,
        policy_loss_fn="dpo",
        can_balance_batch=False,
        schema="dpo",
        modes=OFFLINE,
        fixed_repeat_times=True,
    ),
}
"""Algorithm type -> what it is made of."""

GROUP_ADVANTAGES: dict[str, str | None] = {
    "asymre": "asymre_verl",
    "gigpo": None,
    "grpo": "grpo_verl",
    "opmd": "opmd_verl",
    "rec": None,
    "reinforce": None,
    "step_wise_grpo": None,
}
"""Advantages of finished experiences, before the trainer sees them -> the same in the trainer."""
