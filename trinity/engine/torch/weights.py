"""Put new weights into a model in place, by Hugging Face name, and say what it holds."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trinity.common.models.adapters import adapter_parameters
from trinity.engine.torch.packed_linear import pack_shared_weights, packed_layers
from trinity.utils.digest import weights_digest


@torch.no_grad()
def load_weights_inplace(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> str:
    """Copy ``weights`` into the parameters of the same names; the digest of the result.

    Tied parameters have one name, the first. Of a model with an adapter it is the adapter's.

    Raises:
        ValueError: A name is unknown, given twice or missing, or a shape or dtype differs. The
            model is then partly updated.
    """
    parameters = updated_parameters(model)
    packed = packed_layers(model)
    missing = set(parameters)
    for name, tensor in weights:
        if name not in missing:
            raise ValueError(f"Weights name {name!r}, which {_kind(name, parameters)}.")
        parameter = parameters[name]
        if (parameter.shape, parameter.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"Weight {name!r} came as {tensor.dtype} {tuple(tensor.shape)}, but the engine has"
                f" {parameter.dtype} {tuple(parameter.shape)}: send what the engine runs."
            )
        if name in packed:
            packed[name].pack(tensor)
        else:
            parameter.copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(parameters)} weights did not come: {sorted(missing)[:5]}."
        )
    pack_shared_weights(model)
    return model_digest(model)


def model_digest(model: nn.Module) -> str:
    """`weights_digest` of what updates change of a model, tied parameters once."""
    packed = packed_layers(model)
    return weights_digest(
        (name, packed[name].unpacked() if name in packed else parameter)
        for name, parameter in updated_parameters(model).items()
    )


def updated_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that weight updates bring: those of the adapter, or all without one."""
    return adapter_parameters(model) or dict(model.named_parameters())


def _kind(name: str, parameters: dict[str, nn.Parameter]) -> str:
    return "came twice" if name in parameters else "the model does not have"
