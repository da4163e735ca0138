"""Routes: which experts a mixture-of-experts model sends each token to, noted or prescribed.

Rollout and training compute with other kernels, so that close decisions of a router fall otherwise;
a token then runs through other weights, and its log-probability jumps. Training that takes the
routes of the rollout has no such jumps (R3, arXiv:2510.11370); how much each expert counts is still
computed, and differentiated, from the router's own outputs.

Shape letters: N = tokens, L = layers of the model, E = experts, K = experts of a token. Layers
without experts have `UNKNOWN`, or whatever an engine puts there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trinity.common.constants import EXPERT_COUNTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPE = torch.int16
UNKNOWN = -1
"""In the place of an expert: the router decides."""

_TOPK = (torch.topk, Tensor.topk)


class Routers:
    """The routers of a model, in the order of its layers.

    Args:
        model: One whose routers take the K best of E by one ``topk``, as transformers' own do. Its
            routers are changed in place; alone they work as before.

    Raises:
        ValueError: The model has none.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        config = model.config.get_text_config()
        routers = _routers_of(model)
        if not routers:
            raise ValueError(
                f"A model of type {config.model_type!r} has no experts to route tokens to: set "
                "algorithm.enable_router_replay and enable_return_routed_experts to false."
            )
        self.num_layers = int(config.num_hidden_layers)
        self.per_token = int(config.num_experts_per_tok)
        names = [name for name in EXPERT_COUNTS if hasattr(config, name)]
        self._num_experts = int(getattr(config, names[0]))
        self._given_NLK: Tensor | None = None
        self._noted: dict[int, Tensor] | None = None
        for layer, router in routers.items():
            router.forward = partial(self._route, layer, router.forward)  # type: ignore[method-assign]

    def follow(self, routes_NLK: Tensor | None) -> None:
        """Prescribe the routes of the passes from here on, and of their backward passes.

        Args:
            routes_NLK: On the device of the model; `UNKNOWN` leaves a token to the router. None:
                routers decide on all.
        """
        self._given_NLK = None if routes_NLK is None else routes_NLK.long()

    @contextmanager
    def noting(self) -> Iterator[Callable[[], Tensor]]:
        """Within, passes note their routes; what is yielded gives those of the last, [N, L, K]."""
        noted: dict[int, Tensor] = {}
        self._noted = noted
        try:
            yield lambda: self._stacked(noted)
        finally:
            self._noted = None

    def _stacked(self, noted: Mapping[int, Tensor]) -> Tensor:
        unknown = torch.full_like(next(iter(noted.values())), UNKNOWN)
        layers = range(self.num_layers)
        return torch.stack([noted.get(layer, unknown) for layer in layers], 1).to(DTYPE)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._given_NLK is None and self._noted is None:
            return forward(*args, **kwargs)
        choosing = _Choosing(self._num_experts, self.per_token, partial(self._chosen, layer))
        with choosing:
            found = forward(*args, **kwargs)
        if not choosing.was_asked:
            raise RuntimeError(
                f"The router of layer {layer} does not choose experts by one topk, as routers of "
                "transformers do: set algorithm.enable_router_replay to false for this model."
            )
        return found

    def _chosen(self, layer: int, own_NK: Tensor) -> Tensor:
        """The experts to take where a router would take its own."""
        chosen_NK = own_NK
        if self._given_NLK is not None:
            given_NK = self._given_NLK[:, layer]
            chosen_NK = torch.where(given_NK == UNKNOWN, own_NK, given_NK)
        if self._noted is not None:
            self._noted[layer] = chosen_NK
        return chosen_NK


class _Choosing(TorchFunctionMode):
    """Within, the choice of K among E experts is ``choose``'s.

    Attributes:
        was_asked: Whether there was such a choice.
    """

    def __init__(self, num_experts: int, per_token: int, choose: Callable[[Tensor], Tensor]):
        super().__init__()
        self._num_experts = num_experts
        self._per_token = per_token
        self._choose = choose
        self.was_asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in _TOPK:
            return found
        scores_NE = args[0] if args else kwargs["input"]
        wanted = (self._num_experts, self._per_token)
        if scores_NE.ndim != 2 or (scores_NE.shape[-1], found.indices.shape[-1]) != wanted:
            return found  # of groups of experts
        self.was_asked = True
        chosen_NK = self._choose(found.indices)
        return torch.return_types.topk((scores_NE.gather(-1, chosen_NK), chosen_NK))


def _routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """What transformers itself takes router logits from, by number of the layer."""
    kinds = tuple(kind for part in model.modules() for kind in _router_types(part))
    named = [(name, part) for name, part in model.named_modules() if isinstance(part, kinds)]
    return {next(int(n) for n in name.split(".") if n.isdigit()): part for name, part in named}


def _router_types(module: nn.Module) -> list[type[nn.Module]]:
    """As a part of a model names them: a class, or classes in a record or a list."""
    found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
    listed: list[Any] = found if isinstance(found, list) else [found]
    return [getattr(entry, "target_class", entry) for entry in listed]


def filled(routes: Tensor, length: int) -> Tensor:
    """[length, L, K] routes of the first tokens, `UNKNOWN` for those behind."""
    whole = routes.new_full((length, *routes.shape[1:]), UNKNOWN)
    whole[: len(routes)] = routes[:length]
    return whole


def joined(earlier: Tensor | None, whole: Tensor | None) -> Tensor | None:
    """Routes of a sequence of which ``earlier`` knows the beginning better: it was sampled so.

    Args:
        whole: Of all tokens; None: not known, nor are those of the whole then.
    """
    if earlier is None or whole is None:
        return whole
    known = earlier != UNKNOWN
    return torch.cat([torch.where(known, earlier, whole[: len(earlier)]), whole[len(earlier) :]])
