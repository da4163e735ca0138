"""`sudoku_workflow`: fill a grid; wrong cells are pointed out and may be tried again."""

from collections.abc import Mapping
from typing import Any, ClassVar

from trinity.rewards.sudoku import Grid, as_grid, is_solution
from trinity.workflows.envs.base import EnvWorkflow, Messages, Outcome
from trinity.workflows.envs.sudoku.generator import make_puzzle

_RULES = """\
Solve the sudoku: every row, column and box holds each number from 1 to {size} once; 0 is an empty \
cell. Think first, then give the whole grid, one row a line, inside <answer> tags."""


class SudokuWorkflow(EnvWorkflow):
    """Reward 1 for a solved grid, less ``workflow_args.retry_cost`` (0.1) for each further try.

    The row holds ``puzzle`` and ``solution`` (rows, or digits as one text), or ``size`` (4 or 9),
    ``num_empty`` and ``seed``, from which they are made. ``workflow_args.max_turns`` (3) is the
    number of tries. Metrics: ``solved``, ``right_cells`` (share of the empty cells).
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"retry_cost": float}
    default_max_turns = 3

    def begin(self) -> Messages:
        row = self.task.raw_task
        if "puzzle" in row:
            self._puzzle, self._solution = as_grid(row["puzzle"]), as_grid(row["solution"])
        else:
            size = int(row.get("size", 4))
            num_empty = int(row.get("num_empty", size * 2))
            self._puzzle, self._solution = make_puzzle(size, num_empty, int(row.get("seed", 0)))
        self._num_tries = 0
        rules = _RULES.format(size=len(self._puzzle))
        return [
            {"role": "system", "content": rules},
            {"role": "user", "content": drawn(self._puzzle)},
        ]

    def act(self, reply: str) -> Outcome:
        self._num_tries += 1
        try:
            grid = as_grid(_answer_in(reply))
            if len(grid) != len(self._puzzle):
                raise ValueError("wrong size")
        except ValueError:
            size = len(self._puzzle)
            text = f"I can't read that as a grid of {size} rows with {size} numbers."
            return Outcome(text, metrics={"solved": 0.0, "right_cells": 0.0})
        if is_solution(self._puzzle, grid):
            cost = float(self.task.workflow_args.get("retry_cost", 0.1))
            reward = max(1.0 - cost * (self._num_tries - 1), 0.0)
            return Outcome("", reward, True, {"solved": 1.0, "right_cells": 1.0})
        wrong = self._wrong_cells(grid)
        listed = ", ".join(f"row {r + 1} column {c + 1}" for r, c in wrong[:10])
        metrics = {"solved": 0.0, "right_cells": self._share_right(grid)}
        return Outcome(f"Not right yet. Look again at {listed}.", metrics=metrics)

    def _wrong_cells(self, grid: Grid) -> list[tuple[int, int]]:
        cells = [(r, c) for r, row in enumerate(grid) for c in range(len(row))]
        return [(r, c) for r, c in cells if grid[r][c] != self._solution[r][c]]

    def _share_right(self, grid: Grid) -> float:
        empty = [(r, c) for r, row in enumerate(self._puzzle) for c, n in enumerate(row) if n == 0]
        return sum(grid[r][c] == self._solution[r][c] for r, c in empty) / max(len(empty), 1)


def drawn(grid: Grid) -> str:
    """A grid as text, one row a line."""
    return "\n".join(" ".join(map(str, row)) for row in grid)


def _answer_in(reply: str) -> str:
    start = reply.rfind("<answer>")
    text = reply[start + len("<answer>") :] if start >= 0 else reply
    return text.split("</answer>")[0]
