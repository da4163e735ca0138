"""Load checkpoints outside of trinity: what ranks saved, as a state dict for transformers."""

import os
from pathlib import Path

from torch import Tensor

from trinity.checkpoint.shards import load_full_state_dict


def load_fsdp_state_dict_from_verl_checkpoint(
    checkpoint_path: str | os.PathLike[str],
) -> dict[str, Tensor]:
    """The weights in ``.../global_step_N/actor``, put together from the shards of all ranks.

    For ``AutoModelForCausalLM.from_pretrained(...).load_state_dict(...)``. Reads checkpoints of
    trinity's torch trainer and of veRL's FSDP engines, from any number of ranks.

    Raises:
        FileNotFoundError: There are no shards, or those of some rank are missing.
    """
    return load_full_state_dict(Path(checkpoint_path))
