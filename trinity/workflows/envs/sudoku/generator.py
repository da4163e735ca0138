"""Puzzles of 4 x 4 and 9 x 9 with one solution, from a seed."""

import random

from trinity.rewards.sudoku import Grid


def make_puzzle(size: int, num_empty: int, seed: int) -> tuple[Grid, Grid]:
    """A puzzle with up to ``num_empty`` empty cells and exactly one solution, and that."""
    rng = random.Random(seed)
    solution = _filled(size, rng)
    puzzle = [row[:] for row in solution]
    cells = [(r, c) for r in range(size) for c in range(size)]
    rng.shuffle(cells)
    for r, c in cells:
        if num_empty == 0:
            break
        kept, puzzle[r][c] = puzzle[r][c], 0
        if _count_solutions([row[:] for row in puzzle], 2) == 1:
            num_empty -= 1
        else:
            puzzle[r][c] = kept
    return puzzle, solution


def _filled(size: int, rng: random.Random) -> Grid:
    """A random full grid: a regular one with rows, columns and numbers exchanged."""
    box = round(size**0.5)

    def order() -> list[int]:
        bands = rng.sample(range(box), box)
        return [band * box + place for band in bands for place in rng.sample(range(box), box)]

    rows, columns = order(), order()
    numbers = rng.sample(range(1, size + 1), size)
    return [[numbers[(box * (r % box) + r // box + c) % size] for c in columns] for r in rows]


def _count_solutions(grid: Grid, limit: int) -> int:
    """Solutions of ``grid``, counted up to ``limit``; the emptiest choices are tried first."""
    best: tuple[int, int] | None = None
    choices: set[int] = set()
    for r, row in enumerate(grid):
        for c, cell in enumerate(row):
            if cell == 0:
                possible = _possible(grid, r, c)
                if best is None or len(possible) < len(choices):
                    best, choices = (r, c), possible
    if best is None:
        return 1
    count = 0
    for number in choices:
        grid[best[0]][best[1]] = number
        count += _count_solutions(grid, limit - count)
        if count >= limit:
            break
    grid[best[0]][best[1]] = 0
    return count


def _possible(grid: Grid, r: int, c: int) -> set[int]:
    size = len(grid)
    box = round(size**0.5)
    top, left = r - r % box, c - c % box
    taken = set(grid[r]) | {row[c] for row in grid}
    taken |= {grid[top + i][left + j] for i in range(box) for j in range(box)}
    return set(range(1, size + 1)) - taken
