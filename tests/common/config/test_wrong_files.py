"""Wrong files: each is refused fast, by a message that names the key and a fix that works."""

import time

import pytest

from tests.common.config.files import with_edits, write
from tests.common.config.wrong import (
    adapters,
    algorithms,
    data,
    gpus,
    models,
    old_keys,
    spelling,
    stages,
    sync,
    text,
    tinker,
    trainers,
    values,
)
from trinity.common.config.validate import validate_file

AREAS = [
    adapters, algorithms, data, gpus, models, old_keys, spelling, stages, sync, text, tinker,
    trainers, values,
]  # fmt: skip
WRONG = [wrong for area in AREAS for wrong in area.CASES]
every_wrong_file = pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)


def test_names_are_of_one_case_each():
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)


@every_wrong_file
def test_wrong_file_is_refused_with_a_fix(wrong, tmp_path):
    path = write(tmp_path, wrong.broken)
    started = time.process_time()
    problems = validate_file(path).problems
    seconds = time.process_time() - started
    told = [problem for problem in problems if problem.key == wrong.key]
    assert told, [str(problem) for problem in problems]
    assert any(wrong.says in problem.fix for problem in told), [problem.fix for problem in told]
    assert told[0].line is not None
    assert seconds < 1


@every_wrong_file
def test_the_fix_works(wrong, tmp_path):
    problems = validate_file(write(tmp_path, wrong.repaired)).problems
    assert [str(problem) for problem in problems] == []


def test_all_problems_are_told_at_once(tmp_path):
    edits = {
        "buffer.batch_sise": 8,
        "mode": "boht",
        "algorithm.repeat_times": 1,
        "model.model_path": "${oc.env:NO_SUCH_VARIABLE}",
        "algorithm.kl_loss_fn": "k9",
    }
    problems = validate_file(write(tmp_path, with_edits(edits))).problems
    assert {problem.key for problem in problems} == set(edits)
    assert [problem.line for problem in problems] == sorted(problem.line for problem in problems)


def test_a_missing_file_is_a_problem(tmp_path):
    [problem] = validate_file(tmp_path / "none.yaml").problems
    assert "There is no file" in problem.message
    [problem] = validate_file(tmp_path).problems
    assert "is a folder" in problem.message
