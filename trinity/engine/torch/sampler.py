"""Draw one token a row from logits: temperature, top-k, top-p, min-p and a stream per sample.

A compiled kernel draws where it can and nothing is cut off; what it draws for a row does not depend
on the other rows either.

Shape suffixes: B = rows, V = vocabulary (for PyTorch padded to whole blocks with -inf).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity.common.models import kernels
from trinity.common.models.kernels import drawing

_BLOCK = 256  # tokens per partial sum of the distribution function
_SHORTLIST = 1024  # most likely tokens that top-p looks at before it sorts the whole vocabulary
_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)


def stream_key(seed: int, index: int) -> int:
    """Key of the random stream of sample ``index`` under ``seed``."""
    seeds = _mix(np.array([seed % 2**64], dtype=_U64))
    return int(_mix(seeds + np.array([index + 1], dtype=_U64) * _GOLDEN)[0])


def uniform(key_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """The number in (0, 1) that each stream has at its position; float64."""
    bits = _mix(key_B + (position_B.astype(_U64) + _U64(1)) * _GOLDEN) >> _U64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection of 64 bits in which every bit matters."""
    bits = (bits ^ (bits >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> _U64(27))) * _U64(0x94D049BB133111EB)
    return bits ^ (bits >> _U64(31))


@dataclass
class DrawParams:
    """How each of B rows is drawn.

    Args:
        temperature, top_p, top_k, min_p: [B]; temperature 0 takes the most likely token.
        uniform: [B] float64 in (0, 1).
        forbidden: Row -> token ids that may not be drawn now. Like top-p they are a cut: the
            logprobs do not know of it.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    top_k: np.ndarray
    min_p: np.ndarray
    uniform: np.ndarray
    forbidden: dict[int, list[int]]

    @property
    def divisor(self) -> np.ndarray:
        """[B] what logits are divided by."""
        return np.where(self.temperature == 0, 1.0, self.temperature).astype(np.float32)

    @property
    def is_cut(self) -> np.ndarray:
        """[B] whether top-k, top-p or min-p leave tokens out."""
        cut = (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)
        return np.asarray(cut & (self.temperature != 0))

    def of(self, rows: np.ndarray) -> "DrawParams":
        """The parameters of some rows."""
        forbidden = {
            place: self.forbidden[row]
            for place, row in enumerate(rows.tolist())
            if row in self.forbidden
        }
        return DrawParams(
            self.temperature[rows],
            self.top_p[rows],
            self.top_k[rows],
            self.min_p[rows],
            self.uniform[rows],
            forbidden,
        )


def _padded(logits: Tensor) -> Tensor:
    """Float32 copy with the vocabulary padded to whole blocks."""
    rows, size = logits.shape
    width = -(-size // _BLOCK) * _BLOCK
    if width == size:
        return logits.to(torch.float32, copy=True)
    out = torch.full((rows, width), -math.inf, dtype=torch.float32, device=logits.device)
    out[:, :size] = logits
    return out


def draw(logits_BV: Tensor, params: DrawParams) -> tuple[np.ndarray, np.ndarray]:
    """Token and logprob per row.

    The logprob is that of the temperature-scaled distribution before any cut.

    Raises:
        FloatingPointError: A row's logits are not finite.
    """
    if not drawing.fits(logits_BV):
        return _draw(_padded(logits_BV), params)
    divisor_B = torch.from_numpy(params.divisor)
    given = (divisor_B, torch.from_numpy(params.uniform))
    token_B, logprob_B, log_norm_B = drawing.draw_tokens(logits_BV, *given)
    _require_finite(log_norm_B.numpy())
    is_special = params.is_cut | (params.temperature == 0)
    is_special[list(params.forbidden)] = True
    if is_special.any():
        rows = np.flatnonzero(is_special)
        logits = logits_BV[rows]
        tokens = torch.from_numpy(_draw(_padded(logits), params.of(rows))[0])
        token_B[rows] = tokens
        logprob_B[rows] = kernels.token_statistics(logits, divisor_B[rows], tokens, False)[0]
    return token_B.numpy(), logprob_B.numpy()


def _draw(logits_BV: Tensor, params: DrawParams) -> tuple[np.ndarray, np.ndarray]:
    """`draw` by PyTorch; ``logits_BV`` (of `_padded`) is overwritten."""
    is_greedy = params.temperature == 0
    if (params.temperature != 1).any():
        logits_BV.div_(torch.from_numpy(params.divisor).to(logits_BV.device)[:, None])
    top_B = logits_BV.amax(dim=1)
    weight_BV = (logits_BV - top_B[:, None]).exp_()
    sums = _block_sums(weight_BV)
    log_total_B = np.log(sums.sum(dim=1).cpu().numpy()) + top_B.cpu().numpy()
    _require_finite(log_total_B)
    touched = _cut(logits_BV, weight_BV, params)
    if touched:
        rows = torch.tensor(touched, device=weight_BV.device)
        sums[rows] = _block_sums(weight_BV[rows])
    token_B = _invert(weight_BV, sums, params.uniform)
    if is_greedy.any():
        greedy = torch.from_numpy(np.flatnonzero(is_greedy)).to(weight_BV.device)
        token_B[greedy] = logits_BV[greedy].argmax(dim=1)
    chosen_B = logits_BV.gather(1, token_B[:, None])[:, 0].cpu().numpy()
    return token_B.cpu().numpy(), (chosen_B - log_total_B).astype(np.float32)


def _require_finite(log_total_B: np.ndarray) -> None:
    if not np.isfinite(log_total_B).all():
        raise FloatingPointError("The model's logits are not finite; its weights are damaged.")


def token_logprobs(logits_BV: Tensor, token_B: Tensor, temperature: float) -> np.ndarray:
    """Logprob of one given token a row."""
    temperature = temperature or 1.0
    if drawing.fits(logits_BV):
        divisor_B = torch.full((len(logits_BV),), temperature, dtype=torch.float32)
        found, _, _ = kernels.token_statistics(logits_BV, divisor_B, token_B, False)
        return np.asarray(found.numpy())
    logits_BV = _padded(logits_BV).div_(temperature)
    top_B = logits_BV.amax(dim=1)
    chosen_B = logits_BV.gather(1, token_B[:, None])[:, 0]
    total_B = _block_sums(logits_BV.sub_(top_B[:, None]).exp_()).sum(dim=1)
    logs_B = np.log(total_B.cpu().numpy()) + top_B.cpu().numpy()
    return (chosen_B.cpu().numpy() - logs_B).astype(np.float32)


def _block_sums(weight_BV: Tensor) -> Tensor:
    return weight_BV.view(len(weight_BV), -1, _BLOCK).sum(dim=2).double()


def _invert(weight_BV: Tensor, sum_BN: Tensor, uniform_B: np.ndarray) -> Tensor:
    """First token at which the running sum of weights reaches ``uniform`` of the whole."""
    running = sum_BN.cumsum(dim=1)
    goal = torch.from_numpy(uniform_B).to(running.device) * running[:, -1]
    block = torch.searchsorted(running, goal[:, None]).clamp_(max=running.shape[1] - 1)
    before = (running.gather(1, block) - sum_BN.gather(1, block))[:, 0]
    rows = torch.arange(len(weight_BV), device=weight_BV.device)
    inside = weight_BV.view(len(weight_BV), -1, _BLOCK)[rows, block[:, 0]].double().cumsum(dim=1)
    rest = torch.minimum((goal - before).clamp_(min=0), inside[:, -1])
    # A goal of 0 would stop at a token of weight 0; the least positive double does not.
    place = torch.searchsorted(inside, rest.clamp_(min=5e-324)[:, None])
    return block[:, 0] * _BLOCK + place[:, 0].clamp_(max=_BLOCK - 1)


def _cut(logits_BV: Tensor, weight_BV: Tensor, params: DrawParams) -> list[int]:
    """Set to 0 the weights that top-k, top-p, min-p or a ban exclude; the rows it touched."""
    touched = set(params.forbidden)
    for row, tokens in params.forbidden.items():
        logits_BV[row, tokens] = -math.inf
        # Beside a banned token that was far more likely all weights may be 0: they are made anew.
        weight_BV[row] = (logits_BV[row] - logits_BV[row].max()).exp()
    for row in np.flatnonzero(params.is_cut).tolist():
        floor = _floor(weight_BV[row], *(float(x[row]) for x in _cuts(params)))
        weight_BV[row].masked_fill_(weight_BV[row] < floor, 0)
        touched.add(row)
    return sorted(touched)


def _cuts(params: DrawParams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return params.top_k, params.top_p, params.min_p


def _floor(weight_V: Tensor, top_k: float, top_p: float, min_p: float) -> float:
    """The least weight that stays. Tokens of equal weight stay or go together."""
    floor = min_p * float(weight_V.max()) if min_p > 0 else 0.0
    vocabulary = len(weight_V)
    if 0 < top_k < vocabulary:
        kept = weight_V.topk(int(top_k)).values
        floor = max(floor, float(kept[-1]))
    if top_p < 1:
        floor = max(floor, _nucleus_floor(weight_V, top_p, floor))
    return floor


def _nucleus_floor(weight_V: Tensor, top_p: float, floor: float) -> float:
    """Weight of the last token of the nucleus, among the tokens not below ``floor``."""
    total = float(weight_V[weight_V >= floor].double().sum())
    for size in (min(_SHORTLIST, len(weight_V)), len(weight_V)):
        ranked = weight_V.topk(size).values
        running = ranked.double().cumsum(dim=0)
        if float(running[-1]) >= top_p * total:
            break
    place = int(torch.searchsorted(running, top_p * total))
    return float(ranked[min(place, size - 1)])
