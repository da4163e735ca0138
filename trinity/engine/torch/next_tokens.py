"""From the logits of running samples to their next tokens, and which samples these end."""

import numpy as np
import torch
from torch import Tensor

from trinity.engine.torch.jobs import SampleRows
from trinity.engine.torch.pieces import index_tensor
from trinity.engine.torch.sampler import DrawParams, draw, uniform


def next_tokens(rows: SampleRows, logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """A token for each row, and its logprob."""
    too_short = np.flatnonzero(rows["count"] < rows["min_tokens"])
    params = DrawParams(
        temperature=rows["temperature"],
        top_p=rows["top_p"],
        top_k=rows["top_k"],
        min_p=rows["min_p"],
        uniform=uniform(rows["stream_key"], rows["count"]),
        forbidden={int(row): rows.jobs[row].stop_ids for row in too_short},
    )
    return draw(_penalised(rows, logits), params)


def is_stopped(rows: SampleRows, tokens: np.ndarray, eos_ids: np.ndarray) -> np.ndarray:
    """Whether each row ends with the token that it has just been given."""
    stopped = np.isin(tokens, eos_ids)
    for row in np.flatnonzero(~rows["is_usual"]).tolist():
        stopped[row] = _stops(rows, row, int(tokens[row]))
    return stopped


def _penalised(rows: SampleRows, logits: Tensor) -> Tensor:
    penalised = np.flatnonzero(rows["repetition_penalty"] != 1).tolist()
    if penalised:
        logits = logits.to(torch.float32, copy=True)
    for row in penalised:
        penalty = float(rows["repetition_penalty"][row])
        seen = np.concatenate([rows.jobs[row].tokens, rows.new_tokens(row)])
        ids = index_tensor(np.unique(seen), logits.device)
        value = logits[row, ids]
        logits[row, ids] = torch.where(value > 0, value / penalty, value * penalty)
    return logits


def _stops(rows: SampleRows, row: int, token: int) -> bool:
    job = rows.jobs[row]
    if token in job.stop_ids:
        return True
    is_long_enough = rows["count"][row] >= job.params.min_tokens
    return bool(
        is_long_enough
        and job.has_stop_text is not None
        and job.has_stop_text(rows.new_tokens(row).tolist())
    )
