"""Names that more than one room uses: choices of the YAML file and environment variables."""

from __future__ import annotations

from enum import StrEnum


class Choice(StrEnum):
    """One of a few words in a YAML file, written in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        word = str(value).strip().lower()
        return next((member for member in cls if member.value == word), None)


LEAST_TEMPERATURE = 0.01
"""Above 0. Below it logits divided by the temperature leave no digits for logprobs in float32."""


class Mode(Choice):
    """Which halves of a run are started."""

    BOTH = "both"
    TRAIN = "train"
    EXPLORE = "explore"
    BENCH = "bench"
    SERVE = "serve"
    COLOCATE = "colocate"

    @property
    def trains(self) -> bool:
        """Whether this mode starts a trainer."""
        return self in (Mode.BOTH, Mode.TRAIN, Mode.COLOCATE, Mode.SERVE)

    @property
    def explores(self) -> bool:
        """Whether this mode starts an explorer."""
        return self is not Mode.TRAIN

    @property
    def pairs(self) -> bool:
        """Whether explorer and trainer run side by side in one command."""
        return self in (Mode.BOTH, Mode.COLOCATE, Mode.SERVE)


class SyncMethod(Choice):
    """How weights travel from the trainer to the engines."""

    NCCL = "nccl"
    CHECKPOINT = "checkpoint"
    MEMORY = "memory"


class SyncStyle(Choice):
    """Who decides when weights travel."""

    FIXED = "fixed"
    TRAINER_DRIVEN = "trainer_driven"
    EXPLORER_DRIVEN = "explorer_driven"
    FULLY_ASYNC = "fully_async"


class EngineType(Choice):
    """What generates tokens."""

    TORCH = "torch"
    VLLM = "vllm"
    OPENAI = "openai"
    TINKER = "tinker"


class TrainerType(Choice):
    """What computes gradients."""

    TORCH = "torch"
    VERL = "verl"
    TINKER = "tinker"


class TrainerStrategy(Choice):
    """How a model is spread over training GPUs."""

    FSDP = "fsdp"
    FSDP2 = "fsdp2"
    MEGATRON = "megatron"


class StorageType(Choice):
    """Where rows lie."""

    FILE = "file"
    SQL = "sql"
    QUEUE = "queue"
    REASONING_GYM = "reasoning_gym"
    VERIFIERS = "verifiers"


class PromptType(Choice):
    """How a row holds its prompt."""

    MESSAGES = "messages"
    PLAINTEXT = "plaintext"


class SaveStrategy(Choice):
    """How many checkpoint writers may work at once."""

    SINGLE_THREAD = "single_thread"
    SINGLE_PROCESS = "single_process"
    SINGLE_NODE = "single_node"
    UNRESTRICTED = "unrestricted"


class SaveHF(Choice):
    """Which checkpoints also get Hugging Face files."""

    LAST = "last"
    ALWAYS = "always"
    NEVER = "never"


class OnSaveError(Choice):
    """What a failed checkpoint does to the run."""

    CONTINUE = "continue"
    STOP = "stop"


class OnBadRow(Choice):
    """What a row that cannot be read does to the run."""

    ERROR = "error"
    SKIP = "skip"


class ConcurrentMode(Choice):
    """How the repeats of one task share a runner."""

    SEQUENTIAL = "sequential"
    ASYNCHRONOUS = "asynchronous"
    MULTI_THREADING = "multi-threading"


class LRScheduler(Choice):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class LogLevel(Choice):
    """Least severe message that a log file keeps."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class OpType(Choice):
    """Arithmetic of a reward shaping step."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"


SELECTOR_METRIC = "selector_metric"
"""Metric key under which `pass_rate_calculator` hands its result to task selectors."""

ENV_CHECKPOINT_ROOT_DIR = "TRINITY_CHECKPOINT_ROOT_DIR"
ENV_MAX_EXPERIENCE_BYTES = "TRINITY_MAX_EXP_SIZE"

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields by which the config of a mixture-of-experts model tells how many experts it has."""

ROUTES = "routed_experts"
"""Field of an experience, and column of a training batch: the experts that its tokens went to."""
