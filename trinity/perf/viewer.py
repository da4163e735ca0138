"""The viewer: a page of a buffer of experiences, or of raw rows. Run by `trinity view`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from trinity.common.experience import Experience
from trinity.common.models.loading import load_tokenizer
from trinity.common.schema.database import Database
from trinity.common.schema.tables import ExperienceTables, Filters, StoredExperience
from trinity.launcher.turns import Decode, Turn, turns_of
from trinity.perf.raw_viewer import COLUMN, RowsViewer, offset_of_page
from trinity.utils.words import counted

_PER_PAGE = 10


class ExperienceViewer:
    """The page of one buffer.

    Args:
        url: Address of the database, or the path of a SQLite file.
        table: Name of the buffer.
        tokenizer: Folder of the tokenizer; "" shows the texts that experiences carry.
    """

    def __init__(self, url: str, table: str, tokenizer: str = "") -> None:
        self.database = Database(url, must_exist=True)
        self.tables = ExperienceTables(table)
        self._tokenizer = tokenizer

    def main(self) -> None:
        """Draw the page."""
        st.set_page_config(page_title="trinity view", layout="wide")
        st.title(f"Experiences of {self.tables.name}")
        filters = self._filters()
        with self.database as database:
            if not database.has_table(self.tables.name):
                known = ", ".join(database.table_names()) or "none"
                st.error(f"There is no table {self.tables.name!r}; there are: {known}.")
                return
            count = database.read(lambda c: self.tables.count(c, filters))
            offset = offset_of_page(count, "experiences")
            rows = database.read(lambda c: self.tables.query(c, offset, _PER_PAGE, filters))
        decode = self._decode() if rows else str
        for row in rows:
            self._show(row, decode)

    def _filters(self) -> Filters:
        """What the reader wants to see; an empty field is no condition."""
        with st.sidebar:
            low, high = st.columns(2)
            reward_min = low.number_input("Reward from", value=None, key="reward_min")
            reward_max = high.number_input("to", value=None, key="reward_max")
            oldest = low.number_input("Version from", value=None, step=1, key="version_min")
            newest = high.number_input("to", value=None, step=1, key="version_max")
            task = st.text_input("Task", key="task").strip()
        return Filters(reward_min, reward_max, oldest, newest, task or None)

    def _show(self, row: StoredExperience, decode: Decode) -> None:
        experience = row.experience
        reward = "none" if experience.reward is None else f"{experience.reward:.4g}"
        eid = experience.eid
        title = f"{row.id}: task {eid.task}, run {eid.run}, step {eid.step} — reward {reward}"
        with st.expander(title, expanded=True):
            for turn in self._turns(experience, decode):
                st.caption(f"{turn.who}, {counted(turn.num_tokens, 'token')}")
                st.code(turn.text, language=None, wrap_lines=True)
            st.json(_figures(experience, row.consumed), expanded=False)

    def _turns(self, experience: Experience, decode: Decode) -> Iterable[Turn]:
        """Without a tokenizer a reply has the text that came with it, if it is all of one piece."""
        turns = list(turns_of(experience, decode))
        if not self._tokenizer and len(turns) == 2 and experience.response_text:
            turns[1] = replace(turns[1], text=experience.response_text)
        return turns

    def _decode(self) -> Decode:
        if not self._tokenizer:
            st.sidebar.caption(
                "Tokens without a text are numbers: `--tokenizer MODEL_FOLDER` reads them."
            )
            return lambda ids: " ".join(map(str, ids))
        tokenizer = _tokenizer(self._tokenizer)
        return lambda ids: tokenizer.decode(list(ids))


@st.cache_resource(show_spinner="Loading the tokenizer")
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


def _figures(experience: Experience, consumed: int) -> dict[str, Any]:
    """What stands beside the text of an experience."""
    plain = (bool, int, float, str)
    info = {name: value for name, value in experience.info.items() if isinstance(value, plain)}
    return {
        "metrics": experience.metrics,
        "info": info,
        "truncated": experience.truncate_status,
        "times read": consumed,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the page of the buffer that the command line names."""
    parser = argparse.ArgumentParser()
    for name in ("--url", "--table", "--tokenizer", "--schema"):
        parser.add_argument(name, default="")
    given = parser.parse_args(arguments)
    show_table(given.url, given.table, given.tokenizer, given.schema)


def show_table(url: str, table: str, tokenizer: str = "", schema: str = "") -> None:
    """Draw the page of a table by what it holds; ``schema`` says what that should be, if given."""
    with Database(url, must_exist=True) as database:
        columns = database.column_names(table)
    is_raw = COLUMN in columns
    if columns and schema and is_raw == (schema == "experience"):
        held = "raw rows (--schema sft, dpo or task)" if is_raw else "experiences"
        st.error(f"The table {table!r} holds {held}, not what --schema {schema} says.")
    elif is_raw:
        RowsViewer(url, table).main()
    else:
        ExperienceViewer(url, table, tokenizer).main()


if __name__ == "__main__":
    main()
