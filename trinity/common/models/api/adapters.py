"""Adapters in the API: which one a request names, the list of models, loading and unloading."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from trinity.common.models.api.errors import ApiError
from trinity.common.models.protocol import NamedAdapter

if TYPE_CHECKING:
    from trinity.common.models.wrapper import ModelWrapper


class LoadRequest(BaseModel):
    """``POST /v1/load_lora_adapter``, as vLLM's server has it.

    Args:
        lora_path: A folder on the machine of the engines.
        load_inplace: Take the place of one of the same name, which stays if this one is refused.
    """

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_path: str = Field(min_length=1)
    base_model_name: str = ""
    load_inplace: bool = False


class UnloadRequest(BaseModel):
    """``POST /v1/unload_lora_adapter``; vLLM's clients may send the adapter's number besides."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = None


async def named_model(name: str | None, model: "ModelWrapper") -> "ModelWrapper":
    """``model``, or its adapter ``name``; an answer with status 404 where neither has that name."""
    own = _own_names(model)
    if not name or name in own:
        return model
    names = [adapter.name for adapter in await model.adapters()]
    if name in names:
        return model.with_adapter(name)
    served = [model.model_name, *own[2:], *names]
    shown = f"{', '.join(map(repr, served))} {'is' if len(served) == 1 else 'are'}"
    raise ApiError(404, f"The model {name!r} is not served here, but {shown}.")


def add_adapter_routes(app: FastAPI, prefix: str, model_of: Any) -> None:
    """``/v1/models``, and what loads and unloads adapters.

    Args:
        model_of: FastAPI's dependency that gives the model of a request.
    """

    @app.get(f"{prefix}/v1/models", response_model=None)
    async def models(model: Any = model_of) -> Response:
        return JSONResponse({"object": "list", "data": await _cards(model)})

    @app.post(f"{prefix}/v1/load_lora_adapter", response_model=None)
    async def load(request: LoadRequest, model: Any = model_of) -> Response:
        _refuse_unless_on(model)
        await _load(request, model)
        return PlainTextResponse(f"Success: LoRA adapter {request.lora_name!r} added successfully.")

    @app.post(f"{prefix}/v1/unload_lora_adapter", response_model=None)
    async def unload(request: UnloadRequest, model: Any = model_of) -> Response:
        _refuse_unless_on(model)
        await _unload(request.lora_name, model)
        text = f"Success: LoRA adapter {request.lora_name!r} removed successfully."
        return PlainTextResponse(text)


async def _load(request: LoadRequest, model: "ModelWrapper") -> None:
    name, engines = request.lora_name, model.endpoint.group
    if name in _own_names(model):
        raise ApiError(400, f"The name {name!r} is taken by what is trained; pick another.")
    known = {adapter.name: adapter for adapter in await model.adapters()}
    if name in known and not request.load_inplace:
        text = f"The adapter {name!r} is loaded. Unload it first, or send load_inplace: true."
        raise ApiError(400, text)
    if request.load_inplace:
        with suppress(LookupError):  # of several engines some may have it, which is not known then
            await engines.unload_adapter(name)
    try:
        await engines.load_adapter(NamedAdapter(name, request.lora_path, request.base_model_name))
    except ValueError as error:
        if name in known:
            with suppress(ValueError):  # its files may be those that were just refused
                await engines.load_adapter(known[name])
        raise ApiError(400, str(error)) from error


async def _unload(name: str, model: "ModelWrapper") -> None:
    try:
        await model.endpoint.group.unload_adapter(name)
    except LookupError as error:
        raise ApiError(404, f"No adapter {name!r} is loaded.") from error


async def _cards(model: "ModelWrapper") -> list[dict[str, object]]:
    """The model, the adapter that is trained on it, and those beside it."""
    base, trained = model.model_name, model.get_lora_request()
    cards = [_card(model, base, model.model_path, None)]
    if trained is not None:
        cards.append(_card(model, trained, model.model_path, base))
    for adapter in await model.adapters():
        cards.append(_card(model, adapter.name, adapter.path, adapter.base_model_name or base))
    return cards


def _card(model: "ModelWrapper", name: str, root: str, parent: str | None) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "trinity",
        "root": root,
        "parent": parent,
        "max_model_len": model.model_config.max_model_len,
    }


def _own_names(model: "ModelWrapper") -> list[str]:
    """Names of the weights that updates bring: of the model, its path, its adapter."""
    adapter = model.get_lora_request()
    return [model.model_name, model.model_path, *([] if adapter is None else [adapter])]


def _refuse_unless_on(model: "ModelWrapper") -> None:
    if not model.model_config.loads_adapters:
        text = (
            "Adapters are not loaded at run time here: set "
            "explorer.rollout_model.enable_runtime_lora_updating to true."
        )
        raise ApiError(404, text)
