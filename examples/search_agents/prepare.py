"""Makes the mailbox of the example: `python examples/search_agents/prepare.py`."""

import sqlite3
from pathlib import Path

MAILBOX = Path(__file__).parent / "data" / "mail.sqlite"
COLUMNS = "message_id, date, from_address, to_address, subject, body"
ANN, BOB = "ann@example.com", "bob@example.com"
MAILS = [
    ("m1", "2001-02-03", ANN, BOB, "Lunch", "Let us have lunch in the Red Lion. Ann"),
    ("m2", "2001-02-05", BOB, ANN, "Re: Lunch", "I will be there at noon. Bob"),
    ("m3", "2001-03-01", "rail@example.com", BOB, "Your ticket", "To Rome: leaves at 9:40."),
]


def make(path: Path = MAILBOX) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        connection.execute(f"create table emails ({COLUMNS})")
        connection.executemany("insert into emails values (?, ?, ?, ?, ?, ?)", MAILS)


if __name__ == "__main__":
    make()
    print(f"The mailbox is {MAILBOX}.")
