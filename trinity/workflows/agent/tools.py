"""Tools for agents: Python functions with a schema read off their signature."""

import inspect
import json
import types
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trinity.utils.threads import shared_threads
from trinity.workflows.agent.sandbox import run_python

ToolFunction = Callable[..., Any | Awaitable[Any]]

_TYPES: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Args:
        schema: Its description in the OpenAI form.
        limit: Characters of a result that the model is shown.
    """

    name: str
    function: ToolFunction
    schema: Mapping[str, Any]
    limit: int = 4000

    @classmethod
    def of(cls, function: ToolFunction, name: str | None = None, limit: int = 4000) -> "Tool":
        """The tool of a function: its docstring tells the model what it does."""
        name = name or str(getattr(function, "__name__", type(function).__name__))
        schema = {
            "type": "function",
            "function": {
                "name": name,
                "description": inspect.getdoc(function) or "",
                "parameters": parameters_schema(function),
            },
        }
        return cls(name, function, schema, limit)

    async def call(self, arguments: str | Mapping[str, Any]) -> str:
        """What the call gives, as text; an error is a text too, for the model to read."""
        try:
            values = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
            if not isinstance(values, Mapping):
                raise TypeError("arguments must be a JSON object")
            inspect.signature(self.function).bind(**values)
            if inspect.iscoroutinefunction(self.function):
                result = await self.function(**values)
            else:
                result = await shared_threads().run(partial(self.function, **values))
            if inspect.isawaitable(result):  # a decorator may hide a coroutine
                result = await result
            text = result if isinstance(result, str) else json.dumps(result, default=str)
        except Exception as error:  # a tool: its error is what the model is told
            return f"Error: {type(error).__name__}: {error}"[: self.limit]
        return text if len(text) <= self.limit else text[: self.limit] + " [cut]"


async def python(code: str) -> str:
    """Run Python code and return what it prints. Each call starts afresh."""
    return (await run_python(code)).output or "(nothing was printed)"


#: Tools that `workflow_args.tools` may name; anything else is the dotted path of a function.
BUILT_IN: dict[str, ToolFunction] = {"python": python}


def load_tools(names: Sequence[str], limit: int = 4000) -> dict[str, Tool]:
    """Tools by name.

    Raises:
        ValueError: No built-in tool has that name, and it is no dotted path.
    """
    tools = [Tool.of(_function(name), name.rpartition(".")[2], limit) for name in names]
    return {tool.name: tool for tool in tools}


def _function(name: str) -> ToolFunction:
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(
            f"No tool is called {name!r}. Built in: {', '.join(BUILT_IN)}; for one of your own, "
            "give its path, e.g. 'my_package.my_module.my_function'."
        )
    function: ToolFunction = getattr(import_module(module), attribute)
    return function


def parameters_schema(function: ToolFunction) -> dict[str, Any]:
    """JSON schema of a function's parameters, by their annotations."""
    hints = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {
        "type": "object",
        "properties": {p.name: type_schema(hints.get(p.name, str)) for p in named},
        "required": [p.name for p in named if p.default is p.empty],
    }


def type_schema(hint: object) -> dict[str, Any]:
    """JSON schema of an annotation: plain types, lists, optional and literal ones."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {**type_schema(type(arguments[0])), "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return type_schema(next(a for a in arguments if a is not type(None)))
    if origin is list and arguments:
        return {"type": "array", "items": type_schema(arguments[0])}
    return {"type": _TYPES.get(origin or hint, "string")}
