"""Makes the database of the example: `python examples/sql/prepare.py`."""

import sqlite3
from pathlib import Path

DATABASE = Path(__file__).parent / "data" / "shop.sqlite"
GOODS = [("tea", 3), ("cake", 5), ("honey", 9), ("bread", 2)]


def make(path: Path = DATABASE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute("create table goods (name text, price int)")
        connection.executemany("insert into goods values (?, ?)", GOODS)


if __name__ == "__main__":
    make()
    print(f"The database is {DATABASE}.")
