"""`sudoku_reward`: a filled grid keeps the rules and the given cells."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trinity.common.rewards import RewardFn

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)

Grid = list[list[int]]


class SudokuRewardFn(RewardFn):
    """``accuracy`` 1 for a grid that solves the row's puzzle, else 0; ``cells``, the share of the
    empty cells that a partial solution fills rightly, times ``cell_coef``.

    The row holds ``puzzle`` (rows of numbers, 0 for empty, or their digits as one text) and
    perhaps ``solution``; without one, any grid that keeps the rules is right.
    """

    def __init__(self, cell_coef: float = 0.0) -> None:
        self.cell_coef = cell_coef

    def __call__(self, response: str, metadata: Mapping[str, Any]) -> dict[str, float]:
        puzzle = as_grid(metadata["puzzle"])
        answers = _ANSWER.findall(response)
        try:
            grid = as_grid(answers[-1] if answers else response)
        except ValueError:
            return {"accuracy": 0.0, "cells": 0.0}
        if len(grid) != len(puzzle):
            return {"accuracy": 0.0, "cells": 0.0}
        share = 0.0
        if metadata.get("solution"):
            share = _share_right(puzzle, grid, as_grid(metadata["solution"]))
        return {
            "accuracy": float(is_solution(puzzle, grid)),
            "cells": self.cell_coef * share,
        }


def as_grid(value: str | Sequence[Sequence[int]]) -> Grid:
    """A square grid from rows, or from a text with its digits in order.

    Raises:
        ValueError: The digits make no square of 4 or 9.
    """
    if not isinstance(value, str):
        return [[int(cell) for cell in row] for row in value]
    cells = [int(c) if c.isdigit() else 0 for c in value if c.isdecimal() or c in "._"]
    size = {16: 4, 81: 9}.get(len(cells))
    if size is None:
        raise ValueError(f"{len(cells)} cells are no sudoku: 16 or 81 are.")
    return [cells[start : start + size] for start in range(0, len(cells), size)]


def is_solution(puzzle: Grid, grid: Grid) -> bool:
    """Whether ``grid`` is full, keeps the rules and the numbers of ``puzzle``."""
    keeps = all(
        given in (0, cell)
        for row, filled in zip(puzzle, grid, strict=True)
        for given, cell in zip(row, filled, strict=True)
    )
    return keeps and all(sorted(group) == list(range(1, len(grid) + 1)) for group in groups(grid))


def groups(grid: Grid) -> list[list[int]]:
    """Rows, columns and boxes."""
    size = len(grid)
    box = round(size**0.5)
    columns = [[row[c] for row in grid] for c in range(size)]
    boxes = [
        [grid[r + i][c + j] for i in range(box) for j in range(box)]
        for r in range(0, size, box)
        for c in range(0, size, box)
    ]
    return grid + columns + boxes


def _share_right(puzzle: Grid, grid: Grid, solution: Grid) -> float:
    empty = [(r, c) for r, row in enumerate(puzzle) for c, cell in enumerate(row) if cell == 0]
    return sum(grid[r][c] == solution[r][c] for r, c in empty) / max(len(empty), 1)
