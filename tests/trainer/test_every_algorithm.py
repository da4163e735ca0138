"""Three steps of every algorithm type with its own defaults, from experiences to weights.

Rollouts are made up; sample strategy, advantages, preparation, loss and engine are the real ones.
"""

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import VOCAB, groups, model_folder
from trinity.algorithm import ADVANTAGE_FN, ALGORITHM_TYPE, SAMPLE_STRATEGY
from trinity.algorithm.advantage_fn.base import AdvantageFn, GroupAdvantage
from trinity.common.config import Config, derive
from trinity.common.experience import EID, Experience
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.settings import CriticSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective
from trinity.trainer.preparation import Preparation
from trinity.trainer.update import Updater
from trinity.trainer.value_loss import ValueObjective
from trinity.utils.monitor import TensorboardMonitor

STEPS = 3
ROLLOUTS = 8


class EndlessReader:
    """Gives copies of the same experiences over and over."""

    def __init__(self, exps: list[Experience]) -> None:
        self.exps = exps

    async def read(self, batch_size: int | None = None, **kwargs: object) -> list[Experience]:
        return deepcopy(self.exps[:batch_size])

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def rollouts() -> list[Experience]:
    exps = groups(2, ROLLOUTS // 2, seed=5)
    for exp in exps:
        exp.advantages = None
        exp.teacher_logprobs = exp.logprobs + 0.1 * torch.randn(exp.response_length)
        exp.info = {"env_state_hash": exp.eid.task, "model_version": 0}
    return exps


def answers() -> list[Experience]:
    """Rows of SFT data: a prompt and an answer, neither sampled nor scored."""
    return [
        Experience(eid=EID(task=50 + i), tokens=torch.randint(3, VOCAB, (20,)), prompt_length=9)
        for i in range(ROLLOUTS)
    ]


def pairs() -> list[Experience]:
    rows = torch.randint(3, VOCAB, (3, ROLLOUTS, 7))
    return [
        Experience(eid=EID(task=i), tokens=rows[0, i], chosen=rows[1, i], rejected=rows[2, i, :4])
        for i in range(ROLLOUTS)
    ]


DATA = {"experience": rollouts, "sft": answers, "cpt": answers, "dpo": pairs}


def with_advantages(config: Config, exps: list[Experience]) -> list[Experience]:
    """What the explorer's pipeline makes of the rollouts."""
    name = config.algorithm.advantage_fn
    if not name or ADVANTAGE_FN.get(name).compute_in_trainer():
        return exps
    operator = ADVANTAGE_FN.get(name)(**(config.algorithm.advantage_fn_args or {}))
    assert isinstance(operator, GroupAdvantage)
    return operator.process(exps)[0]


def trainer_parts(config: Config, engine: TorchTrainEngine) -> tuple[Preparation, Updater]:
    given = config.algorithm
    objective = Objective.from_names(
        given.policy_loss_fn or "",
        given.policy_loss_fn_args,
        given.kl_loss_fn or "none",
        given.kl_loss_fn_args,
        given.entropy_loss_fn or "none",
        given.entropy_loss_fn_args,
        given.loss_agg_mode,
    )
    advantage: AdvantageFn | None = None
    if given.advantage_fn and ADVANTAGE_FN.get(given.advantage_fn).compute_in_trainer():
        built = ADVANTAGE_FN.get(given.advantage_fn)(**(given.advantage_fn_args or {}))
        assert isinstance(built, AdvantageFn)
        advantage = built
    requires = advantage.requires if advantage else ()
    assert given.kl_penalty_fn == "none"
    preparation = Preparation(
        engine,
        advantage_fn=advantage,
        needs_reference=objective.needs_reference,
        has_critic="values" in requires,
        needs_entropy="entropy" in requires,
    )
    value_objective = ValueObjective() if "values" in requires else None
    return preparation, Updater(engine, objective, value_objective)


def scalars(folder: Path) -> list[str]:
    """Names of what tensorboard shows of a folder."""
    [file] = folder.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    return events.Tags()["scalars"]


def reads(config: Config, column: str) -> bool:
    name = config.algorithm.advantage_fn
    return bool(name) and column in getattr(ADVANTAGE_FN.get(name), "requires", ())


@pytest.mark.filterwarnings("ignore:GSPO is defined")
@pytest.mark.parametrize("name", [*ALGORITHM_TYPE.names(), "clipb", "clipv"])
async def test_three_steps(tmp_path, name):
    given = {"algorithm_type": name}
    if name.startswith("clip"):
        given = {"algorithm_type": "grpo_verl", "advantage_fn": name}
    algorithm = ALGORITHM_TYPE.get(given["algorithm_type"])
    config, _ = derive(Config.model_validate({"algorithm": given}))
    exps = with_advantages(config, DATA[algorithm.schema]())
    strategy = SAMPLE_STRATEGY.get(config.algorithm.sample_strategy or "default")(
        EndlessReader(exps), ROLLOUTS, {"sft_dataset": EndlessReader(answers())}
    )
    folder = model_folder(tmp_path / "model")
    critic = CriticSettings(folder) if reads(config, "values") else None
    engine = TorchTrainEngine(settings(folder, critic=critic, scores_entropy=reads(config, "necs")))
    await engine.prepare()
    before = {
        n: m.detach().clone() for n, m in engine._trained("actor").optimizer.weights.masters.items()
    }
    preparation, updater = trainer_parts(config, engine)
    config.monitor.cache_dir = str(tmp_path / "monitor")
    monitor = TensorboardMonitor("project", "", name, "trainer", config)
    for step in range(1, STEPS + 1):
        sample, _, _ = await strategy.sample(step)
        metrics: dict[str, float] = {}
        batch = await preparation.complete(TrainBatch.from_experiences(sample), metrics)
        await updater.update(batch, step, metrics)
        assert critic is None or metrics["critic/grad_norm"] > 0
        assert math.isfinite(metrics["actor/final_loss"]) and metrics["actor/grad_norm"] > 0
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        assert ("actor/entropy" in metrics) == reads(config, "entropy")
        monitor.log(metrics, step)
    monitor.close()
    assert set(metrics) <= set(scalars(tmp_path / "monitor"))
    after = engine._trained("actor").optimizer.weights.masters
    assert any(not torch.equal(before[n], after[n]) for n in before)
