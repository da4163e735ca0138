"""What a `VerlTrainRank` has to know beyond the torch trainer's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.engine import ModelRole

Strategy = Literal["fsdp", "fsdp2", "megatron"]


@dataclass(frozen=True)
class MegatronSizes:
    """Over how many ranks Megatron spreads one copy of a model; see `MegatronConfig`.

    Ranks are counted tensor parallel first, then along the sequence, then copies, then stages.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    context: int = 1
    sequence_parallel: bool = True

    @property
    def ranks(self) -> int:
        """Ranks of one copy of the model."""
        return self.tensor * self.context * self.pipeline


@dataclass(frozen=True)
class VerlEngineSettings(TorchEngineSettings):
    """Models, optimizers and how veRL computes.

    Args:
        strategy: Which engine of veRL.
        megatron: How Megatron spreads a model.
        packs: Let sequences go through without padding where flash-attn is installed.
        offload_policy: Let FSDP2 itself move parameters and optimizer state to the CPU.
        verl: Settings that go to veRL as they are, by its own dotted keys; see docs/verl_keys.md.
    """

    strategy: Strategy = "fsdp2"
    megatron: MegatronSizes = MegatronSizes()
    packs: bool = True
    offload_policy: bool = False
    verl: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, same: TorchEngineSettings, **own: Any) -> "VerlEngineSettings":
        """The settings of a torch trainer, and veRL's own."""
        return cls(**{f.name: getattr(same, f.name) for f in fields(same)}, **own)

    @property
    def is_megatron(self) -> bool:
        """Whether veRL's Megatron engine trains, not FSDP."""
        return self.strategy == "megatron"

    @property
    def ranks_per_row(self) -> int:
        return self.megatron.ranks if self.is_megatron else self.sequence_parallel

    @property
    def sequence_shares(self) -> int:
        """Ranks that share the tokens of one row."""
        return self.megatron.context if self.is_megatron else self.sequence_parallel

    def part_of(self, rank: int, world_size: int) -> int:
        if not self.is_megatron:
            return super().part_of(rank, world_size)
        in_stage = rank // (self.megatron.tensor * self.megatron.context)
        return in_stage % (world_size // self.megatron.ranks)

    def tells(self, rank: int, world_size: int) -> bool:
        """Only the last stage of Megatron's pipeline has outputs."""
        if not self.is_megatron:
            return super().tells(rank, world_size)
        is_first = rank % (self.megatron.tensor * self.megatron.context) == 0
        return is_first and rank >= world_size - world_size // self.megatron.pipeline

    def path_of(self, role: ModelRole) -> str:
        """Folder or name that a model comes from."""
        return self._critic.model_path if role == "critic" else self.model_path

    def optimizer_of(self, role: ModelRole) -> OptimizerSettings:
        """What trains a model; meaningless for the reference."""
        return self._critic.optimizer if role == "critic" else self.optimizer

    def memory_of(self, role: ModelRole) -> "Memory":
        """How a model saves memory."""
        if role == "ref":
            return Memory(False, self.reference_offload, False)
        part = self._critic if role == "critic" else self
        return Memory(part.gradient_checkpointing, part.param_offload, part.optimizer_offload)

    @property
    def _critic(self) -> CriticSettings:
        if self.critic is None:
            raise ValueError("This engine has no critic: there is none in its settings.")
        return self.critic


@dataclass(frozen=True)
class Memory:
    """What of a model is computed twice, or kept in CPU memory, to need less on its device."""

    checkpointing: bool
    param_offload: bool
    optimizer_offload: bool
