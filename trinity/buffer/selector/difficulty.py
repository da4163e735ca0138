"""A curriculum that learns during the run: tasks whose pass rate is believed near a target first.

Each row has a Beta belief over its pass rate. What a step observes moves the beliefs of the rows
it used, and by way of two anchor pass rates (of a weaker and a stronger model, columns of the
data) those of all other rows too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from trinity.buffer.rows import DataError
from trinity.buffer.selector.base import BaseSelector, DataSource
from trinity.common.config.buffer import DataSelectorConfig

_CAPABILITY_KEPT = 0.9  # share of the old value in the moving average of the model's capability
_EPS = 1e-6
_LEAST_EXPONENT = -600.0  # below it weights are 0 and can't be drawn, however many are wanted
_ADAPTIVE_ERROR = 0.25


class DifficultyBasedSelector(BaseSelector):
    """Bayesian choice by difficulty; needs exactly two `feature_keys`: lower and upper anchor.

    Keyword arguments (`data_selector.kwargs`):
        m: Rollouts that one observation stands for.
        lamb: Forgetting; share by which beliefs go back to the prior each step, in [0, 1].
        rho: Weight of what the anchors predict against what was observed, in [0, 1].
        target_reward: Pass rate that is wanted.
        tau: Temperature of the choice; 0 takes the best.
        do_sample: Draw pass rates from the beliefs in place of their means.
        adaptive_rho: Halve rho in a step where the prediction is off by 0.25 or more.
    """

    default_kwargs: ClassVar[Mapping[str, object]] = {
        "m": 16,
        "lamb": 0.2,
        "rho": 0.2,
        "target_reward": 1.0,
        "tau": 1.0,
        "do_sample": False,
        "adaptive_rho": False,
    }

    def __init__(self, data_source: DataSource, config: DataSelectorConfig) -> None:
        super().__init__(data_source, config)
        if len(config.feature_keys) != 2:
            raise DataError(
                f"data_selector.feature_keys is {config.feature_keys}; difficulty_based needs two "
                "columns: the pass rates of a weaker and of a stronger model.",
                key="data_selector.feature_keys",
            )
        options = {**self.default_kwargs, **config.kwargs}
        self.m, self.lamb, self.rho = (float(options[k]) for k in ("m", "lamb", "rho"))  # type: ignore[arg-type]  # numbers
        self.target_reward = float(options["target_reward"])  # type: ignore[arg-type]  # number
        self.tau = float(options["tau"])  # type: ignore[arg-type]  # number
        self.do_sample, self.adaptive_rho = (
            bool(options["do_sample"]),
            bool(options["adaptive_rho"]),
        )
        self._lower, self._upper = (_rates_of(data_source, key) for key in config.feature_keys)
        self._alpha, self._beta = np.ones(self.size), np.ones(self.size)
        self._capability: float | None = None
        self._error = 0.0

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        generator = np.random.default_rng(self.seed + self.current_index)
        rates = self._rates(generator)
        scores = -np.abs(self.target_reward - rates)
        chosen: list[int] = []
        while len(chosen) < batch_size:
            count = min(batch_size - len(chosen), self.size)
            chosen.extend(int(index) for index in self._choose(scores, count, generator))
        self.current_index += batch_size
        if not return_extra_info:
            return chosen
        return chosen, {
            "indices": chosen,
            "scores": scores[chosen].tolist(),
            "pass_rates": rates[chosen].tolist(),
        }

    def _rates(self, generator: np.random.Generator) -> np.ndarray:
        if self.do_sample:
            return generator.beta(self._alpha, self._beta)
        return self._alpha / (self._alpha + self._beta)

    def _choose(self, scores: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
        if self.tau == 0:
            return np.argsort(-scores, kind="stable")[:count]
        weights = np.exp(np.maximum((scores - scores.max()) / self.tau, _LEAST_EXPONENT))
        return generator.choice(self.size, count, replace=False, p=weights / weights.sum())

    def feedback(self, indices: Sequence[int], values: Sequence[float]) -> None:
        seen, observed = np.asarray(indices, dtype=int), np.asarray(values, dtype=float)
        is_known = np.isfinite(observed)
        if not is_known.any():
            return
        seen, observed = seen[is_known], observed[is_known].clip(0, 1)  # rewards may be others
        predicted = self._predict(seen, observed)
        self._error = float(np.abs(predicted[seen] - observed).mean())
        predicted[seen] = observed
        successes, failures = np.zeros(self.size), np.zeros(self.size)
        successes[seen], failures[seen] = observed * self.m, (1 - observed) * self.m
        is_off = self.adaptive_rho and self._error >= _ADAPTIVE_ERROR
        keep, rho = 1 - self.lamb, self.rho / 2 if is_off else self.rho
        self._alpha = (
            keep * self._alpha + self.lamb + (1 - rho) * successes + rho * predicted * self.m
        )
        self._beta = (
            keep * self._beta + self.lamb + (1 - rho) * failures + rho * (1 - predicted) * self.m
        )

    def _predict(self, seen: np.ndarray, observed: np.ndarray) -> np.ndarray:
        """Pass rate of every row, between its anchors by the model's capability."""
        lower, upper = self._lower[seen].mean(), self._upper[seen].mean()
        now = (observed.mean() - lower) / (upper - lower + _EPS)
        old = self._capability
        self._capability = (
            float(now)
            if old is None
            else float(_CAPABILITY_KEPT * old + (1 - _CAPABILITY_KEPT) * now)
        )
        return np.clip((self._upper - self._lower) * self._capability + self._lower, 0, 1)

    def metrics(self) -> dict[str, float]:
        return {
            "capability": self._capability or 0.0,
            "prediction_error": self._error,
            "mean_pass_rate": float((self._alpha / (self._alpha + self._beta)).mean()),
        }

    def state_dict(self) -> dict[str, object]:
        return {
            "current_index": self.current_index,
            "alpha": self._alpha.tolist(),
            "beta": self._beta.tolist(),
            "capability": self._capability,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        super().load_state_dict(state)
        if "alpha" not in state:
            return
        alpha, beta = np.array(state["alpha"], dtype=float), np.array(state["beta"], dtype=float)
        if len(alpha) != self.size:
            raise DataError(
                f"The saved selector knows {len(alpha)} tasks, but the data set has {self.size}: "
                "it has changed since the checkpoint."
            )
        self._alpha, self._beta = alpha, beta
        capability = state["capability"]
        self._capability = None if capability is None else float(capability)  # type: ignore[arg-type]  # number


def _rates_of(data_source: DataSource, key: str) -> np.ndarray:
    """A column of pass rates. One that is no number would spoil the beliefs of all rows."""
    rates = []
    for index, value in enumerate(data_source.column(key)):
        try:
            rates.append(float(value))  # type: ignore[arg-type]  # else a TypeError
        except (TypeError, ValueError):
            rates.append(math.nan)
        if not math.isfinite(rates[-1]):
            raise DataError(
                f"data_selector.feature_keys names {key!r}, which is {value!r} in row {index}; "
                "difficulty_based needs a pass rate in every row.",
                key="data_selector.feature_keys",
            )
    return np.array(rates)
