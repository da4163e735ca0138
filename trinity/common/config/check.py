"""What contradicts what in a configuration, found without disk, network or GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trinity.common.config.case import Case, Check, cases_of
from trinity.common.config.check_algorithm import ALGORITHM_CHECKS
from trinity.common.config.check_arguments import ARGUMENT_CHECKS
from trinity.common.config.check_data import DATA_CHECKS
from trinity.common.config.check_model import MODEL_CHECKS
from trinity.common.config.check_sync import SYNC_CHECKS
from trinity.common.config.check_tinker import TINKER_CHECKS
from trinity.common.config.check_trainer import TRAINER_CHECKS
from trinity.common.config.gpus import gpu_problems
from trinity.common.config.root import Config
from trinity.common.config.verl.check import VERL_CHECKS
from trinity.common.errors import Problem


def find_problems(config: Config) -> list[Problem]:
    """Everything in ``config`` and its stages that cannot work, each with its line."""
    return problems_of(config, cases_of(config))


def problems_of(config: Config, cases: Sequence[Case]) -> list[Problem]:
    """`find_problems` of what is filled in already: ``cases`` are the stages of ``config``."""
    found: dict[tuple[str, str], Problem] = {}
    for problem in _all(config, cases):
        line = problem.line or config.source.line(problem.key)
        found.setdefault((problem.key, problem.message), replace(problem, line=line))
    return list(found.values())


def _all(config: Config, cases: Sequence[Case]) -> Iterator[Problem]:
    yield from _stage_names(config)
    yield from _tinker_stages(config)
    for index, case in enumerate(cases):
        for check in CHECKS:
            for problem in check(case):
                yield _in_stage(config, index, problem)


def _in_stage(config: Config, index: int, problem: Problem) -> Problem:
    """``problem`` under the key of the stage, if the stage is where it was written."""
    key = f"stages.{index}.{problem.key}"
    written_there = bool(config.stages) and key in config.source.lines
    return replace(problem, key=key) if written_there else problem


def _stage_names(config: Config) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, stage in enumerate(config.stages):
        if stage.stage_name in seen:
            key = f"stages.{index}.stage_name"
            message = "Another stage has this name; their folders would be one."
            fix = f"Call it `{stage.stage_name}_{index + 1}`."
            yield Problem(key, message, fix, stage.stage_name)
        seen.add(stage.stage_name)
        yield from _strays(f"stages.{index}.stage_name", stage.stage_name)


def _strays(key: str, name: str) -> Iterator[Problem]:
    """A name of a folder that leads out of the one that it should be in, or is none."""
    parts = "".join(filter(str.isprintable, name)).split("/")
    kept = "/".join(part for part in parts if part not in ("", ".", ".."))
    if name.startswith("/") or {".", ".."} & set(parts) or not name.isprintable():
        field = key.rpartition(".")[2]
        message = "A folder is named by it, and this is no name of a folder within the others'."
        yield Problem(key, message, f"Write `{field}: {kept or f'my_{field}'}`.", name)


def _tinker_stages(config: Config) -> Iterator[Problem]:
    if config.model.tinker.enable and len(config.stages) > 1:
        message = "A stage starts from the files of the one before, and Tinker keeps its weights."
        yield Problem("stages", message, "Keep one stage.")


def _names(case: Case) -> Iterator[Problem]:
    for key in ("project", "name"):
        if not getattr(case.config, key):
            message = "This must not be empty: the job's folder is named by it."
            yield case.problem(key, message, f"Write `{key}: my_{key}`.")
    for key in ("project", "group", "name"):
        yield from _strays(key, getattr(case.config, key))
    if case.config.explorer.name == case.config.trainer.name:
        message = "Explorer and trainer have the same name; their files would be one."
        yield case.problem("explorer.name", message, "Write `name: explorer` in `explorer`.")


def _monitor(case: Case) -> Iterator[Problem]:
    yield from case.unknown("monitor.monitor_type", "MONITOR")


def _gpus(case: Case) -> Iterator[Problem]:
    cluster = case.config.cluster
    yield from gpu_problems(case.config, cluster.node_num, cluster.gpu_per_node)


CHECKS: tuple[Check, ...] = (
    _names,
    *ALGORITHM_CHECKS,
    *ARGUMENT_CHECKS,
    *MODEL_CHECKS,
    *DATA_CHECKS,
    *SYNC_CHECKS,
    *TRAINER_CHECKS,
    *TINKER_CHECKS,
    *VERL_CHECKS,
    _monitor,
    _gpus,
)
