"""Rows of a batch as the service takes and answers them.

It is given all tokens but the last, and the token that follows each: its logprob ``k`` is that of
token ``k + 1`` of the row. Shape suffixes: B = rows, T = response tokens (padded).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trinity.engine.tinker.service import sdk
from trinity.trainer.batch import TrainBatch

if TYPE_CHECKING:
    from tinker import Datum


def trained_rows(weight_BT: Tensor) -> list[int]:
    """Rows with a token that counts."""
    found: list[int] = weight_BT.any(dim=1).nonzero()[:, 0].tolist()
    return found


def data_of(batch: TrainBatch, rows: Sequence[int], weight_BT: Tensor) -> "list[Datum]":
    """The given rows; the service minimises the sum of ``-weight * logprob`` over their tokens."""
    tokens, prompts = batch.row_tokens(), batch["prompt_length"].tolist()
    return [_datum(tokens[row], prompts[row], weight_BT[row]) for row in rows]


def _datum(tokens: Tensor, prompt: int, weight_T: Tensor) -> "Datum":
    length = len(tokens) - prompt
    weights = torch.zeros(len(tokens) - 1)
    weights[prompt - 1 :] = weight_T[:length]
    return sdk().Datum(
        model_input=sdk().ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": tokens[1:].long(), "weights": weights},
    )


def by_row(batch: TrainBatch, rows: Sequence[int], found: Sequence[Tensor]) -> Tensor:
    """[B, T] what was found of the last tokens of the given rows; 0 where nothing is trained."""
    mask_BT = batch["action_mask"]
    whole = torch.zeros(mask_BT.shape)
    lengths = batch.response_lengths.tolist()
    for row, values in zip(rows, found, strict=True):
        length = lengths[row]
        whole[row, :length] = values[len(values) - length :].float()
    return torch.where(mask_BT, whole, 0.0)
