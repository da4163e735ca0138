"""GiGPO: credit to runs within a task, and to steps that start from the same state.

arXiv:2505.10978. The episode part compares the returns of a task's runs, the step part the
discounted returns of steps that were taken in equal states.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from trinity.algorithm.advantage_fn.base import (
    GroupAdvantage,
    GroupResult,
    Metrics,
    is_live,
    update_advantage,
)
from trinity.algorithm.advantage_fn.stats import finite_reward, mean, std
from trinity.algorithm.advantage_fn.step_wise_grpo import run_reward, runs_of
from trinity.common.experience import Experience
from trinity.utils.metrics import summarize

Run = list[Experience]


class GiGPOGroupAdvantage(GroupAdvantage):
    """``A = A_E + omega A_S`` on every step of a run.

    ``A_E`` is the run's return, ``A_S`` the step's discounted return, each as
    ``(x - mean) / (denom + epsilon)``: within the runs of the task, and within the steps of the
    whole batch that have the same state hash. A single run has mean 0 and denom 1; a step alone in
    its state has ``A_S = 0``.

    Rewards of steps are ``info[step_reward_key]``, 0 where a step lacks it; a run in which no step
    has it earns the reward of its last experience at its end.

    Args:
        omega: Weight of the step part.
        gamma: Discount per step.
        fnorm: denom: ``none`` for 1, ``std`` for the unbiased deviation.
        epsilon: Added to denom.
        step_reward_key: Where `info` has the reward of a step.
        env_state_hash_key: Where `info` has what identifies the state a step was taken in.
    """

    def __init__(
        self,
        omega: float = 1.0,
        gamma: float = 1.0,
        fnorm: Literal["none", "std"] = "none",
        epsilon: float = 1e-6,
        step_reward_key: str = "step_reward",
        env_state_hash_key: str = "env_state_hash",
    ) -> None:
        if fnorm not in ("none", "std"):
            raise ValueError(f"fnorm is {fnorm!r}; choose 'none' or 'std'.")
        self.omega, self.gamma = omega, gamma
        self.fnorm, self.epsilon = fnorm, epsilon
        self.step_reward_key, self.env_state_hash_key = step_reward_key, env_state_hash_key

    def calculate_group_advantage(self, group_id: str, exps: list[Experience]) -> GroupResult:
        return self.process(exps)

    def process(self, exps: Sequence[Experience]) -> GroupResult:
        for experience in exps:
            update_advantage(experience, 0.0)
        runs = [run for run in runs_of(exps) if any(map(is_live, run))]
        rewards = [self._step_rewards(run) for run in runs]
        of_run, episode_metrics = self._episode_part(runs, rewards)
        of_step, step_metrics = self._step_part(runs, rewards)
        for run in runs:
            for experience in run:
                episode = of_run[experience.eid.rid]
                update_advantage(experience, episode + self.omega * of_step[id(experience)])
        metrics = episode_metrics | step_metrics | {"filtered_count": 0.0}
        return list(exps), metrics

    def _step_rewards(self, run: Run) -> list[float]:
        key = self.step_reward_key
        if not any(key in experience.info for experience in run):
            return [0.0] * (len(run) - 1) + [run_reward(run)]
        found = [(experience.info.get(key, 0.0), experience.eid.uid) for experience in run]
        return [finite_reward(reward, uid) for reward, uid in found]  # type: ignore[arg-type]  # info is free-form

    def _episode_part(
        self, runs: Sequence[Run], rewards: Sequence[Sequence[float]]
    ) -> tuple[dict[str, float], Metrics]:
        """A_E by run id."""
        of_task: dict[str, dict[str, float]] = defaultdict(dict)
        for run, reward in zip(runs, rewards, strict=True):
            of_task[run[0].eid.tid][run[0].eid.rid] = sum(reward)
        advantages: dict[str, float] = {}
        per_task: list[Metrics] = []
        for returns in of_task.values():
            values = list(returns.values())
            center, scale = self._norm(values) if len(values) > 1 else (0.0, 1.0)
            for rid, value in returns.items():
                advantages[rid] = (value - center) / (scale + self.epsilon)
            per_task.append(
                {"episode_reward_mean": mean(values), "episode_reward_std": std(values)}
            )
        metrics = summarize(per_task, "gigpo")
        metrics["gigpo/mean_abs_A_E"] = _mean_abs(advantages.values())
        return advantages, metrics

    def _step_part(
        self, runs: Sequence[Run], rewards: Sequence[Sequence[float]]
    ) -> tuple[dict[int, float], Metrics]:
        """A_S by identity of the experience."""
        in_state: dict[str, list[tuple[int, float]]] = defaultdict(list)
        advantages: dict[int, float] = {}
        for run, reward in zip(runs, rewards, strict=True):
            for experience, value in zip(run, self._discounted(reward), strict=True):
                advantages[id(experience)] = 0.0
                state = experience.info.get(self.env_state_hash_key)
                if state is not None and is_live(experience):
                    in_state[str(state)].append((id(experience), value))
        shared = [steps for steps in in_state.values() if len(steps) > 1]
        for steps in shared:
            center, scale = self._norm([value for _, value in steps])
            for key, value in steps:
                advantages[key] = (value - center) / (scale + self.epsilon)
        num_steps = sum(map(len, in_state.values()))
        hits = sum(map(len, shared))
        return advantages, {
            "gigpo/anchor_groups_total": float(len(in_state)),
            "gigpo/anchor_groups_size_gt1": float(len(shared)),
            "gigpo/anchor_group_hit_ratio": hits / num_steps if num_steps else 0.0,
            "gigpo/mean_abs_A_S": _mean_abs(advantages.values()),
        }

    def _norm(self, values: Sequence[float]) -> tuple[float, float]:
        return mean(values), 1.0 if self.fnorm == "none" else std(values)

    def _discounted(self, rewards: Sequence[float]) -> list[float]:
        returns: list[float] = []
        for reward in reversed(rewards):
            returns.append(reward + self.gamma * (returns[-1] if returns else 0.0))
        return returns[::-1]


def _mean_abs(values: Iterable[float]) -> float:
    sizes = [abs(value) for value in values]
    return sum(sizes) / len(sizes) if sizes else 0.0
