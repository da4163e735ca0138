"""The `buffer:` section: tasks in, experiences out, and how many of each make a step."""

from typing import Annotated, Any

from pydantic import Field

from trinity.common.config.base import LEAVES_DIGITS, ConfigModel
from trinity.common.constants import OnBadRow, PromptType, StorageType


class FormatConfig(ConfigModel):
    """Which column of a row holds what. Keys may be dotted: `reward_model.ground_truth`."""

    prompt_type: PromptType = PromptType.MESSAGES
    """Whether experiences hold `messages` or `plaintext`; tasks always use `prompt_key`."""

    prompt_key: str = "prompt"
    """Column of the prompt or task."""

    response_key: str = "response"
    """Column of the response or right answer."""

    system_prompt_key: str | None = None
    """Column of the system prompt; wins over `system_prompt`."""

    system_prompt: str | None = None
    """System prompt of all rows."""

    messages_key: str = "message"
    """Column of the message list."""

    tools_key: str = "tools"
    """Column of the tool descriptions, a list of objects."""

    image_key: str | None = None
    """Column of the images."""

    video_key: str | None = None
    """Column of the videos; the model sees some of their frames as images."""

    reply_prefix: str | None = None
    """Text that every response starts with."""

    workflow_key: str = ""
    """Column that names the workflow of a row. Empty: the taskset's workflow for all."""

    reward_fn_key: str = ""
    """Column that names the reward function of a row. Empty: the taskset's for all."""

    chosen_key: str = "chosen"
    """Column of the preferred response (DPO)."""

    rejected_key: str = "rejected"
    """Column of the other response (DPO)."""

    enable_concatenated_multi_turn: bool = False
    """Train on every assistant turn of a conversation, not the last only (SFT, `messages`)."""

    chat_template: str | None = None
    """Chat template as text. Unset: `model.custom_chat_template`."""

    enable_thinking: bool | None = None
    """Passed to the chat template. Unset: `model.enable_thinking`."""


class GenerationConfig(ConfigModel):
    """Sampling of one taskset."""

    temperature: Annotated[float | None, LEAVES_DIGITS] = Field(None, ge=0)
    """Sampling temperature; 0 is greedy. Unset: as of `explorer.rollout_model`."""

    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass that is sampled from. Unset: as of `explorer.rollout_model`."""

    top_k: int | None = Field(None, ge=-1)
    """Number of tokens that are sampled from; -1 is all. Unset: as of `explorer.rollout_model`."""

    logprobs: int | None = Field(None, ge=0)
    """As `model.logprobs`: above 0 it has no effect."""

    max_tokens: int | None = Field(None, ge=1)
    """Longest response in tokens. Unset: as of `explorer.rollout_model`."""

    n: int = Field(1, ge=1)
    """Responses of one call; `repeat_times` sets it where a workflow samples a group at once."""


class DataSelectorConfig(ConfigModel):
    """Which tasks come next."""

    selector_type: str = "sequential"
    """Selector: `sequential`, `shuffle`, `random`, `offline_easy2hard`, `difficulty_based`, or
    one of a plugin."""

    seed: int = 42
    """Seed of the order."""

    feature_keys: list[str] = []
    """Columns the selector sorts or learns by."""

    kwargs: dict[str, Any] = {}
    """Arguments of the selector, merged over its defaults."""


class TasksetConfig(ConfigModel):
    """One set of tasks to train or evaluate on."""

    name: str = ""
    """Name in logs and metrics. Empty: `taskset_<i>` or `eval_taskset_<i>`."""

    storage_type: StorageType = StorageType.FILE
    """Where the tasks are: `file` (folder, file or hub name), `sql`, `reasoning_gym` (generated;
    `path` names the data set) or `verifiers` (`path` is the id of a taskset)."""

    path: str | None = None
    """Folder, file, hub name, database or generator of the tasks."""

    split: str = "train"
    """Split of the data set."""

    subset_name: str | None = None
    """Subset of the data set: `name` of `datasets.load_dataset`."""

    format: FormatConfig = FormatConfig()
    """Which column holds what."""

    rollout_args: GenerationConfig = GenerationConfig()
    """Sampling of these tasks."""

    repeat_times: int | None = Field(None, ge=1)
    """Samples of each task. Unset: `algorithm.repeat_times`, or 1 when evaluating."""

    default_workflow_type: str | None = None
    """Workflow of these tasks. Unset: the one of `explorer_input`."""

    default_reward_fn_type: str | None = None
    """Reward function of these tasks. Unset: the one of `explorer_input`."""

    workflow_args: dict[str, Any] = {}
    """Arguments of the workflow."""

    reward_fn_args: dict[str, Any] = {}
    """Arguments of the reward function."""

    data_selector: DataSelectorConfig = DataSelectorConfig()
    """Which tasks come next."""

    on_bad_row: OnBadRow = OnBadRow.ERROR
    """What a row that cannot be read does: `error` ends the run, `skip` counts it."""

    max_retry_times: int = Field(3, ge=0)
    """Further attempts at a read that failed."""

    max_retry_interval: float = Field(1, ge=0)
    """Seconds between two attempts."""

    enable_progress_bar: bool = False
    """Show how far a data set is loaded."""


class ReplayBufferConfig(ConfigModel):
    """Using experiences more than once (queue only)."""

    enable: bool = False
    """Put experiences back after they were read."""

    priority_fn: str = "linear_decay"
    """What comes first: `linear_decay` or `linear_decay_use_count_control_randomization`."""

    reuse_cooldown_time: float | None = Field(None, ge=0)
    """Seconds before an experience may be read again. Unset: never again."""

    priority_fn_args: dict[str, Any] = {"decay": 2.0}
    """Arguments of `priority_fn`."""


class ExperienceBufferConfig(ConfigModel):
    """One place where experiences wait for the trainer, or a data set of them."""

    name: str = ""
    """Name in logs and of the default file. Empty: by position, e.g. `experience_buffer`."""

    storage_type: StorageType | str | None = Field(None, union_mode="left_to_right")
    """Where experiences are: `queue` (in memory), `sql`, `file`, or the name of a plugin's reader
    and writer. Unset: `queue`; `file` for SFT, DPO and auxiliary data sets."""

    path: str | None = None
    """Database, file or folder. Optional for a queue, which then backs itself up there; one without
    is in memory, and what was written to it can be read in `<job>/buffer/<name>.jsonl`."""

    split: str = "train"
    """Split of the data set (`file`)."""

    subset_name: str | None = None
    """Subset of the data set (`file`)."""

    format: FormatConfig = FormatConfig()
    """Which column holds what (`file`)."""

    schema_type: str | None = None
    """What a row is: `experience`, `sft`, `dpo` or `cpt`. Unset: by algorithm."""

    capacity: int = Field(10000, ge=1)
    """Experiences a queue holds before writers wait."""

    max_read_timeout: float = Field(1800, gt=0)
    """Seconds a reader waits for a full batch before it takes the incomplete one."""

    replay_buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Using experiences more than once (queue only)."""

    data_selector: DataSelectorConfig = DataSelectorConfig()
    """Which rows come next (`file`)."""

    total_epochs: int | None = Field(None, ge=1)
    """Times a data set is gone through. Unset: `buffer.total_epochs`."""

    on_bad_row: OnBadRow = OnBadRow.ERROR
    """What a row that cannot be read does: `error` ends the run, `skip` counts it."""

    max_retry_times: int = Field(3, ge=0)
    """Further attempts at a read or write that failed."""

    max_retry_interval: float = Field(1, ge=0)
    """Seconds between two attempts."""

    enable_progress_bar: bool = False
    """Show how far a data set is loaded."""


class ExplorerInputConfig(ConfigModel):
    """The tasks."""

    taskset: TasksetConfig | None = None
    """The tasks to train on, if they are one set."""

    tasksets: list[TasksetConfig] = []
    """The tasks to train on, if they are several sets."""

    eval_tasksets: list[TasksetConfig] = []
    """The tasks to evaluate on."""

    default_workflow_type: str | None = None
    """Workflow of tasksets that name none."""

    default_eval_workflow_type: str | None = None
    """Workflow of eval tasksets that name none. Unset: `default_workflow_type`."""

    default_reward_fn_type: str | None = None
    """Reward function of tasksets that name none."""


class TrainerInputConfig(ConfigModel):
    """The experiences."""

    experience_buffer: ExperienceBufferConfig | None = None
    """What the trainer reads and the explorer writes. Unset: a queue."""

    auxiliary_buffers: dict[str, ExperienceBufferConfig] = {}
    """Further data sets by name, such as `sft_dataset` for `mix`."""


class BufferConfig(ConfigModel):
    """Tasks in, experiences out, and how many of each make a step."""

    batch_size: int = Field(1, ge=1)
    """Tasks of one explorer step."""

    train_batch_size: int = Field(0, ge=0)
    """Experiences of one training step; 0 is `batch_size * algorithm.repeat_times`."""

    total_epochs: int = Field(1, ge=1)
    """Times the tasks are gone through."""

    total_steps: int | None = Field(None, ge=1)
    """Explorer steps of the run; `total_epochs` then has no effect."""

    explorer_input: ExplorerInputConfig = ExplorerInputConfig()
    """The tasks."""

    trainer_input: TrainerInputConfig = TrainerInputConfig()
    """The experiences."""
