"""Sudoku, solved in words."""
