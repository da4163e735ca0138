"""Agents that look things up: on the web, and in a mailbox."""

import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trinity.common.errors import NotSetUpError
from trinity.workflows.agent.react import ReActWorkflow
from trinity.workflows.agent.tools import Tool

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 20.0


class WebSearchWorkflow(ReActWorkflow):
    """A ReAct agent with a web search.

    `workflow_args`: ``search_client_type`` is ``searxng`` (its URL in ``SEARXNG_BASE_URL``) or
    ``tavily`` (its key in ``TAVILY_API_KEY``); ``max_turns`` (10); ``num_results`` (5). The reward
    is the task's; by default the answer must be the truth.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {
        "search_client_type": Literal["searxng", "tavily"],
        "num_results": int,
    }
    default_reward_fn: ClassVar[str] = "accuracy_reward"
    default_max_turns: ClassVar[int] = 10
    default_system_prompt: ClassVar[str] = (
        "Answer the question. Search the web as often as you need. When you know the answer, give "
        "it alone, without calling a tool."
    )

    def tools(self) -> dict[str, Tool]:
        arguments = self.task.workflow_args
        kind = arguments.get("search_client_type", "searxng")
        if kind not in _CLIENTS:
            raise ValueError(f"search_client_type is {kind!r}; use {' or '.join(_CLIENTS)}.")
        variable, search = _CLIENTS[kind]
        secret = os.environ.get(variable)
        if not secret:
            raise NotSetUpError(f"The {kind} search needs the environment variable {variable}.")
        count = int(arguments.get("num_results", 5))

        async def web_search(query: str) -> str:
            """Search the web; titles, addresses and excerpts of the best pages."""
            import httpx

            async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
                found = await search(client, secret, query, count)
            return "\n\n".join(found) or "(nothing was found)"

        limit = int(arguments.get("tool_obs_char_limit", 4000))
        return {"web_search": Tool.of(web_search, limit=limit)}


async def _searxng(client: "httpx.AsyncClient", url: str, query: str, count: int) -> list[str]:
    answer = await client.get(f"{url.rstrip('/')}/search", params={"q": query, "format": "json"})
    results = answer.raise_for_status().json()["results"][:count]
    return [f"{r.get('title')}\n{r.get('url')}\n{r.get('content', '')}" for r in results]


async def _tavily(client: "httpx.AsyncClient", key: str, query: str, count: int) -> list[str]:
    answer = await client.post(
        "https://api.tavily.com/search",
        headers={"Authorization": f"Bearer {key}"},
        json={"query": query, "max_results": count},
    )
    results = answer.raise_for_status().json()["results"]
    return [f"{r.get('title')}\n{r.get('url')}\n{r.get('content', '')}" for r in results]


_CLIENTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "searxng": ("SEARXNG_BASE_URL", _searxng),
    "tavily": ("TAVILY_API_KEY", _tavily),
}


class EmailSearchWorkflow(ReActWorkflow):
    """A ReAct agent that answers questions from a mailbox.

    `workflow_args`: ``database`` is a SQLite file with a table ``emails`` (``message_id``,
    ``date``, ``from_address``, ``to_address``, ``subject``, ``body``); ``max_turns`` (10);
    ``tool_obs_char_limit`` (2000). The row may name the ``inbox`` that is searched.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"database": str}
    default_reward_fn: ClassVar[str] = "accuracy_reward"
    default_max_turns: ClassVar[int] = 10
    default_system_prompt: ClassVar[str] = (
        "Answer the question from the user's mailbox. Search it, read mails, and when you know the "
        "answer, give it alone, without calling a tool."
    )

    def tools(self) -> dict[str, Tool]:
        arguments = self.task.workflow_args
        path = Path(str(arguments.get("database", "")))
        if not path.is_file():
            raise NotSetUpError(
                f"email_search_workflow needs workflow_args.database, but {path} is no SQLite file."
            )
        mailbox = _Mailbox(path, self.task.raw_task.get("inbox"))
        limit = int(arguments.get("tool_obs_char_limit", 2000))
        tools = (mailbox.search_emails, mailbox.read_email)
        return {tool.__name__: Tool.of(tool, limit=limit) for tool in tools}


class _Mailbox:
    def __init__(self, path: Path, inbox: str | None) -> None:
        self._uri = f"file:{path.resolve()}?mode=ro"
        self._inbox = inbox

    def search_emails(
        self, keywords: list[str], sent_after: str = "", sent_before: str = ""
    ) -> str:
        """Mails that hold all keywords, newest first: id, date, sender and subject of up to ten.

        Dates are written YYYY-MM-DD.
        """
        where = ["(subject like ? or body like ?)" for _ in keywords]
        values = [f"%{word}%" for word in keywords for _ in range(2)]
        for sign, date in ((">=", sent_after), ("<", sent_before)):
            if date:
                where.append(f"date {sign} ?")
                values.append(date)
        if self._inbox:
            where.append("(to_address like ? or from_address like ?)")
            values += [f"%{self._inbox}%"] * 2
        rows = self._query(
            "select message_id, date, from_address, subject from emails"
            f" where {' and '.join(where) or '1'} order by date desc limit 10",
            values,
        )
        return "\n".join(" | ".join(map(str, row)) for row in rows) or "(no mail)"

    def read_email(self, message_id: str) -> str:
        """The whole mail with this id."""
        rows = self._query(
            "select from_address, to_address, date, subject, body from emails where message_id = ?",
            [message_id],
        )
        if not rows:
            return f"Error: there is no mail {message_id!r}."
        sender, receiver, date, subject, body = rows[0]
        return f"From: {sender}\nTo: {receiver}\nDate: {date}\nSubject: {subject}\n\n{body}"

    def _query(self, text: str, values: list[str]) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self._uri, uri=True)
        try:
            return connection.execute(text, values).fetchall()
        finally:
            connection.close()
