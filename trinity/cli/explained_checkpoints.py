"""What `trinity explain` says of the checkpoints of a run: how many, and how large."""

from trinity.cli.explained_steps import total_steps
from trinity.cli.explained_words import Row
from trinity.common.config import Config
from trinity.common.config.memory import checkpoint_bytes
from trinity.common.config.shape import ModelShape
from trinity.common.constants import SaveHF
from trinity.utils.words import every


def checkpoint_rows(config: Config, shape: ModelShape) -> list[Row]:
    """How many there will be, and their sizes."""
    if not config.mode.trains:
        return []
    state, hf = checkpoint_bytes(config, shape)
    rows = checkpoint_counts(config)
    rows.append(("training state of one", _size(state), "weights, optimizer, 12 bytes a weight"))
    save_hf = config.trainer.save_hf_checkpoint
    if save_hf is not SaveHF.NEVER:
        which = "each" if save_hf is SaveHF.ALWAYS else "the last"
        rows.append((f"Hugging Face files of {which}", _size(hf), "2 bytes a weight"))
    return rows


def checkpoint_counts(config: Config) -> list[Row]:
    """How many there will be."""
    if not config.mode.trains:
        return []
    interval = config.trainer.save_interval
    total = config.trainer.total_steps or total_steps(config)
    when = f"{every(interval)} and at the end" if interval else "at the end"
    count = str(_saves(total, interval)) if total else when
    kept = config.trainer.max_checkpoints_to_keep
    return [
        ("checkpoints", count, f"trainer.save_interval: {interval}"),
        ("kept", str(kept or "all"), "trainer.max_checkpoints_to_keep"),
    ]


def _saves(total: int, every: int) -> int:
    if not every:
        return 1
    return total // every + (1 if total % every else 0)


def _size(amount: float) -> str:
    return f"{amount / 1e9:.2f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"
