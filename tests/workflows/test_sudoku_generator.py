import pytest

from trinity.rewards.sudoku import is_solution
from trinity.workflows.envs.sudoku.generator import _count_solutions, make_puzzle


@pytest.mark.parametrize(("size", "num_empty"), [(4, 8), (9, 40)])
def test_puzzles_have_one_solution_and_depend_on_the_seed_alone(size, num_empty):
    puzzle, solution = make_puzzle(size, num_empty, seed=3)
    assert is_solution(puzzle, solution)
    assert sum(cell == 0 for row in puzzle for cell in row) <= num_empty
    assert _count_solutions([row[:] for row in puzzle], 2) == 1
    assert make_puzzle(size, num_empty, seed=3) == (puzzle, solution)
    assert make_puzzle(size, num_empty, seed=4)[1] != solution
