"""Names read off source text are those of the registries."""

import pytest

from trinity.common.config.names import builtin_names, known_names
from trinity.utils.registry import Registry


def registries() -> dict[str, Registry]:
    import trinity.algorithm as algorithm
    from trinity.buffer.operators import EXPERIENCE_OPERATORS
    from trinity.buffer.reader import READER
    from trinity.buffer.schema import FORMATTER
    from trinity.buffer.selector import SELECTORS
    from trinity.buffer.storage.priority import PRIORITY_FUNC
    from trinity.buffer.writer import WRITER
    from trinity.common.rewards import REWARD_FUNCTIONS
    from trinity.common.workflows import WORKFLOWS
    from trinity.utils.monitor import MONITOR

    return {
        "ALGORITHM_TYPE": algorithm.ALGORITHM_TYPE,
        "ADVANTAGE_FN": algorithm.ADVANTAGE_FN,
        "POLICY_LOSS_FN": algorithm.POLICY_LOSS_FN,
        "KL_FN": algorithm.KL_FN,
        "ENTROPY_LOSS_FN": algorithm.ENTROPY_LOSS_FN,
        "SAMPLE_STRATEGY": algorithm.SAMPLE_STRATEGY,
        "WORKFLOWS": WORKFLOWS,
        "REWARD_FUNCTIONS": REWARD_FUNCTIONS,
        "SELECTORS": SELECTORS,
        "EXPERIENCE_OPERATORS": EXPERIENCE_OPERATORS,
        "FORMATTER": FORMATTER,
        "PRIORITY_FUNC": PRIORITY_FUNC,
        "READER": READER,
        "WRITER": WRITER,
        "MONITOR": MONITOR,
    }


@pytest.mark.parametrize("name", sorted(builtin_names()))
def test_names_of_what_ships(name):
    registry = registries()[name]
    assert builtin_names()[name] == frozenset(registry._builtins)


def test_names_of_plugins_are_found_without_running_them(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from trinity.common.workflows import WORKFLOWS\n"
        '@WORKFLOWS.register_module("mine")\nclass Mine: ...\nraise RuntimeError\n'
    )
    (tmp_path / "broken.py").write_text("def (")
    names = known_names([tmp_path])["WORKFLOWS"]
    assert "mine" in names
    assert "math_workflow" in names
