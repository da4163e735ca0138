from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.command import Command, trinity_run
from tests.e2e.toy import Toy, eval_set

Start = Callable[..., Command]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ray)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1500))  # a run has limits of its own, below that


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy")).write()


@pytest.fixture
def start(toy: Toy) -> Iterator[Start]:
    """Starts `trinity run` on a configuration; all is ended with the test."""
    with ExitStack() as stack:
        run = partial(trinity_run, plugins=toy.plugins)
        yield lambda config, *overrides, **options: stack.enter_context(
            run(config, *overrides, **options)
        )


@pytest.fixture(scope="session")
def finished(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run of four synchronous steps, with a checkpoint of each second one."""
    config = toy.config(
        tmp_path_factory.mktemp("finished"),
        buffer__total_steps=4,
        buffer__explorer_input__eval_tasksets=eval_set(toy),
        explorer__eval_interval=100,
        trainer__save_interval=2,
        trainer__save_hf_checkpoint="always",
        data_processor__experience_pipeline={"save_input": True},
    )
    with trinity_run(config, plugins=toy.plugins) as command:
        yield command.succeed()
