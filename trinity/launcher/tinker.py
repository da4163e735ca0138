"""RunPlan -> what trainer and engines are told of the Tinker service, and what it can't train."""

from collections.abc import Iterator
from pathlib import Path

from trinity.checkpoint import layout
from trinity.common.config import Config
from trinity.common.errors import Problem
from trinity.common.models.protocol import WeightTicket
from trinity.engine.tinker.saved import SavedModel, ticket_of
from trinity.engine.tinker.settings import TinkerServiceSettings
from trinity.launcher.plan import RunPlan

_BEYOND_LOGPROBS = {"entropy": "entropies", "necs": "entropies", "values": "values"}


def tinker_service(config: Config, base_model: str | None = None) -> TinkerServiceSettings:
    """How to reach the service; None as ``base_model``: the model that is trained."""
    given = config.model.tinker
    return TinkerServiceSettings(
        base_model=base_model or given.base_model or config.model.model_path,
        base_url=given.base_url,
        timeout_s=given.timeout,
    )


def checkpoint_ticket(folder: Path) -> WeightTicket:
    """The weights of ``global_step_N``, for engines to sample from."""
    saved = SavedModel.read(folder / layout.ACTOR)
    return ticket_of(layout.step_of(folder), saved.sampler)


def tinker_problems(plan: RunPlan) -> Iterator[Problem]:
    """What the service can't train, and a checkpoint it can't go on from."""
    yield from _loss_problems(plan.config)
    found = layout.find_latest(plan.job.path).folder
    if found is None:
        return
    fix = "Set `continue_from_checkpoint: false`, or give the job another name."
    try:
        saved = SavedModel.read(found / layout.ACTOR)
    except ValueError as error:
        yield Problem("trainer.trainer_type", f"{error}", fix, "tinker")
        return
    service = tinker_service(plan.config)
    if trouble := saved.difference(service.base_model, plan.config.model.tinker.rank):
        yield Problem("model.tinker.rank", f"The checkpoint {found.name} is {trouble}.", fix)


def _loss_problems(config: Config) -> Iterator[Problem]:
    """Parts of the algorithm that read more than logprobs."""
    from trinity.launcher.build_train_engine import trainer_advantage  # these bring PyTorch
    from trinity.launcher.build_trainer import objective_of

    advantage = trainer_advantage(config)
    read = {
        "policy_loss_fn": objective_of(config).policy_loss_fn.inputs(),
        "advantage_fn": () if advantage is None else advantage.requires,
    }
    for part, columns in read.items():
        for what in {_BEYOND_LOGPROBS[name] for name in columns if name in _BEYOND_LOGPROBS}:
            message = f"It reads {what}; the Tinker service gives logprobs."
            fix = "Take one that reads logprobs alone, such as those of `grpo`."
            yield Problem(f"algorithm.{part}", message, fix, getattr(config.algorithm, part))
