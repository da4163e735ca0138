"""A wrong file, and the keys that many of them are about."""

from dataclasses import dataclass, field
from typing import Any

from tests.common.config.files import DROP, with_edits

TASKSET = "buffer.explorer_input.taskset"
EXPERIENCES = "buffer.trainer_input.experience_buffer"
ROLLOUT = "explorer.rollout_model"
VERL = "trainer.trainer_config.actor_rollout_ref"
SFT = {
    "mode": "train",
    "algorithm": {"algorithm_type": "sft"},
    "buffer.train_batch_size": 8,
    EXPERIENCES: {"path": "/data/sft"},
}
LORA = [{"lora_rank": 8}]


@dataclass(frozen=True)
class Wrong:
    """A wrong file.

    Args:
        edits: Changes to the valid base file that break it, or the text of the whole file.
        key: The key that the message has to name.
        says: Words of the fix.
        repair: Changes (or text) that do what the fix says; the file then validates.
    """

    name: str
    edits: dict[str, Any] | str
    key: str
    says: str
    repair: dict[str, Any] | str = field(default_factory=dict)

    @property
    def broken(self) -> dict[str, Any] | str:
        return self.edits if isinstance(self.edits, str) else with_edits(self.edits)

    @property
    def repaired(self) -> dict[str, Any] | str:
        if isinstance(self.repair, str):
            return self.repair
        assert isinstance(self.edits, dict)
        return with_edits(self.repair, with_edits(self.edits))


def at(name: str, key: str, value: Any, says: str, right: Any = DROP) -> Wrong:
    """A file that ``value`` at one key breaks, and ``right`` there mends."""
    return Wrong(name, {key: value}, key, says, {key: right})
