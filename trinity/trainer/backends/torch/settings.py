"""What a `TorchTrainEngine` has to know: plain values, no sections of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trinity.common.models.adapters import AdapterSettings
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings

SaveStrategy = Literal["single_thread", "single_process", "single_node", "unrestricted"]


@dataclass(frozen=True)
class CriticSettings:
    """The value model, trained beside the actor.

    Args:
        model_path: A model with a value head, or a language model that is given one.
        optimizer: Its own.
        micro_batches: Size of a micro-batch with gradient.
        forward_micro_batches: Size of one without; None: the same.
        gradient_checkpointing: Compute activations again in the backward pass.
        param_offload: Keep its weights in CPU memory while they are not used.
        optimizer_offload: Keep its masters and moments in CPU memory.
    """

    model_path: str
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    micro_batches: MicroBatchRule = field(default_factory=MicroBatchRule)
    forward_micro_batches: MicroBatchRule | None = None
    gradient_checkpointing: bool = False
    param_offload: bool = False
    optimizer_offload: bool = False


@dataclass(frozen=True)
class TorchEngineSettings:
    """Models, optimizers and how to compute.

    Args:
        model_path: Model folder (or hub name) of the actor, and of the frozen reference.
        dtype: What models compute in: "bfloat16" or "float32". Masters are float32 in both.
        seed: Of random weights, where the folder has none, and of the engine's random numbers.
        temperature: Of the distribution that samples come from; logprobs are taken there.
        scores_entropy: Give ``necs`` with the entropies of a forward pass, as `clipv` reads it.
        optimizer: The actor's.
        micro_batches: Size of a micro-batch with gradient.
        forward_micro_batches: Size of one without; None: the same.
        reference_micro_batches: Size of one of the reference model; None: as ``forward_...``.
        shares_prefixes: Compute what the rows of a group begin with alike once.
        gradient_checkpointing: Compute activations again in the backward pass: less memory.
        param_offload: Keep weights in CPU memory while they are not used.
        reference_offload: The same for the reference model.
        optimizer_offload: Keep masters and moments in CPU memory, and step there.
        critic: The value model; None for none.
        adapter: Trained in place of the actor's own weights; the reference model is then the actor
            without it. None: the whole model is trained.
        sequence_parallel: Ranks that share the tokens of the same rows.
        gathers_once: Ranks put weights together and add gradients up once a call, not in every
            pass. None: where that takes little of the GPU's memory.
        balances_ranks: Give all ranks about the same number of tokens, not of groups.
        save_strategy: How many writers of a checkpoint may work at once: one thread, the threads
            of one process, those of one machine, or all.
        device: Where models are.
        compiles_layers: Compile each layer with `torch.compile`, on a GPU: less time a step, but
            some ten seconds more for the first. On a CPU our own layers are faster.
        replays_routes: Tokens of the actor's passes go to the experts that the batch tells.
        trust_remote_code: Run code that comes with the model.
        config_overrides: Fields of the model's config to replace (``rope_theta`` ...).
        chat_template: Written into saved models in place of the tokenizer's own; None keeps that.
        num_threads: Cores to compute on; None: as PyTorch finds.
        log_name: Whose log the engine writes to.
    """

    model_path: str
    dtype: str = "bfloat16"
    seed: int = 42
    temperature: float = 1.0
    scores_entropy: bool = False
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    micro_batches: MicroBatchRule = field(default_factory=MicroBatchRule)
    forward_micro_batches: MicroBatchRule | None = None
    reference_micro_batches: MicroBatchRule | None = None
    shares_prefixes: bool = True
    gradient_checkpointing: bool = False
    param_offload: bool = False
    reference_offload: bool = False
    optimizer_offload: bool = False
    critic: CriticSettings | None = None
    adapter: AdapterSettings | None = None
    sequence_parallel: int = 1
    gathers_once: bool | None = None
    balances_ranks: bool = True
    save_strategy: SaveStrategy = "unrestricted"
    device: str = "cpu"
    compiles_layers: bool = False
    replays_routes: bool = False
    trust_remote_code: bool = False
    config_overrides: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    num_threads: int | None = None
    log_name: str = "trainer"

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.sequence_parallel

    def part_of(self, rank: int, world_size: int) -> int:
        """Which part of the rows is a rank's."""
        return rank // self.ranks_per_row

    def tells(self, rank: int, world_size: int) -> bool:
        """Whether a rank counts, of those that work on the same rows: its outputs, its gradient."""
        return rank % self.ranks_per_row == 0

    def rule(self, which: str, with_gradient: bool) -> MicroBatchRule:
        """Size of a micro-batch of a model ("actor", "ref" or "critic")."""
        if which == "critic" and self.critic is not None:
            forward = self.critic.forward_micro_batches
            return self.critic.micro_batches if with_gradient or forward is None else forward
        if with_gradient:
            return self.micro_batches
        own = self.reference_micro_batches if which == "ref" else None
        return own or self.forward_micro_batches or self.micro_batches

    @property
    def random_weights(self) -> str:
        """What the log says if the actor's folder holds no weights."""
        return f"{self.model_path} has no weights: they are random, from seed {self.seed}."
