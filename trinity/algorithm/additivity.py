"""Is a loss a sum over its rows? What the trainer asks before it splits a plugin's batch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trinity.algorithm.aggregate import LossScope, loss_scope
from trinity.algorithm.policy_loss_fn.base import PolicyLossFn

_UNITS = 4
_TOKENS = 6


def check_additive(
    loss_fn: PolicyLossFn, extra: dict[str, Tensor] | None = None, tolerance: float = 1e-4
) -> bool:
    """Whether shares of micro-batches add up to the loss of the whole batch, in value and gradient.

    The loss is evaluated on a random batch at once and in pieces, under the same `loss_scope`.

    Args:
        loss_fn: The loss, as the trainer would call it.
        extra: Custom fields that the loss names, 8 rows each; the known ones are made up.
        tolerance: Largest difference, relative to the larger of the two.

    Raises:
        ValueError: The loss names a tensor that is neither known nor in ``extra``.
    """
    batch = _random_batch(loss_fn, extra or {})
    scope = LossScope.of(batch["action_mask"], batch["expert_mask"], batch["pair_id"])
    num_rows = len(batch["logprob"])
    whole = _evaluate(loss_fn, batch, scope, [list(range(num_rows))])
    split = _evaluate(loss_fn, batch, scope, [[0, 1], [2, 3, 4, 5], [6, 7]])
    return all(_is_close(a, b, tolerance) for a, b in zip(whole, split, strict=True))


def adds_up(loss_fn: PolicyLossFn, columns: Mapping[str, Tensor]) -> bool:
    """Whether the trainer may sum shares: a built-in loss's own word, a plugin's only if checked.

    Args:
        loss_fn: The loss.
        columns: Tensors of a real batch, of which the custom fields are taken for the check.
    """
    if not loss_fn.additive or type(loss_fn).__module__.startswith("trinity."):
        return loss_fn.additive
    named = [name for name in loss_fn.inputs() if name in columns]
    made_up = _made_up()
    return check_additive(
        loss_fn, {name: _few(columns[name]) for name in named if name not in made_up}
    )


def _few(column: Tensor) -> Tensor:
    """Rows of a column as the check's batch has them: 8, and 6 tokens wide if there are tokens."""
    rows = torch.arange(2 * _UNITS) % len(column)
    few = column.detach().cpu()[rows]
    if few.ndim < 2:
        return few
    short = max(_TOKENS - few.shape[1], 0)
    return torch.nn.functional.pad(few[:, :_TOKENS], (0, short))


def _random_batch(loss_fn: PolicyLossFn, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    known = _made_up() | extra
    unknown = set(_required(loss_fn)) - set(known)
    if unknown:
        raise ValueError(
            f"The loss names {sorted(unknown)}, which no batch has. Known: {sorted(known)}; give "
            "others as custom fields of the experiences."
        )
    return known


def _made_up() -> dict[str, Tensor]:
    """Random tensors by the names that a loss may use."""
    generator = torch.Generator().manual_seed(0)
    num_rows = 2 * _UNITS

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num_rows, _TOKENS, generator=generator)

    logprob = -normal().abs()
    place = torch.arange(num_rows)
    mask = torch.rand(num_rows, _TOKENS, generator=generator) > 0.3
    mask[:, 0] = True
    return {
        "logprob": logprob,
        "old_logprob": logprob + normal(0.3),
        "ref_logprob": logprob + normal(0.3),
        "rollout_log_probs": logprob + normal(0.3),
        "teacher_logprobs": logprob + normal(0.3),
        "action_mask": mask,
        "advantages": normal(),
        "returns": normal(),
        "values": normal(),
        "old_values": normal(),
        "entropy": normal().abs(),
        "expert_mask": place % 3 == 0,
        "step": torch.zeros(num_rows, dtype=torch.int32),
        "pair_id": place // 2,
        "is_chosen": place % 2 == 0,
    }


def _required(loss_fn: PolicyLossFn) -> list[str]:
    optional = set(loss_fn.optional_inputs())
    return [name for name in loss_fn.inputs() if name not in optional]


def _evaluate(
    loss_fn: PolicyLossFn, batch: dict[str, Tensor], scope: LossScope, pieces: Sequence[list[int]]
) -> tuple[Tensor, Tensor]:
    logprob = batch["logprob"].clone().requires_grad_()
    names = [name for name in loss_fn.inputs() if name in batch]
    total = torch.zeros(())
    with loss_scope(scope):
        for rows in pieces:
            tensors = {name: batch[name][rows] for name in names} | {"logprob": logprob[rows]}
            loss, _ = loss_fn(**{name: tensors[name] for name in names})
            total = total + loss
    [gradient] = torch.autograd.grad(total, logprob)
    return total.detach(), gradient


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-12)
    return bool((a - b).abs().max() <= tolerance * scale)
