"""Facts that must hold between a model's files, a checkpoint and the trainer's ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.checkpoint import layout
from trinity.common.config import Config
from trinity.common.config.derive import needs_critic
from trinity.common.config.gpus import batch_problems, ranks_per_row
from trinity.common.constants import EXPERT_COUNTS, EngineType, TrainerStrategy, TrainerType
from trinity.common.errors import Problem
from trinity.launcher.plan import RunPlan

_SEQUENCE = "trainer.ulysses_sequence_parallel_size"
_SHAPE = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    *EXPERT_COUNTS,
    "vocab_size",
    "tie_word_embeddings",
)


def trainer_problems(plan: RunPlan) -> Iterator[Problem]:
    """All that would stop the trainer of a plan once it has loaded its model."""
    config = plan.config
    folder = Path(config.model.model_path).expanduser()
    if not config.mode.trains:
        return
    if config.trainer.trainer_type is TrainerType.TINKER:
        from trinity.launcher.tinker import tinker_problems

        yield from tinker_problems(plan)
        return
    shape = _read(folder / "config.json")
    if config.trainer.trainer_type is TrainerType.VERL:
        from trinity.launcher.check_verl import verl_problems

        yield from verl_problems(plan, shape)
    yield from _number_format_problems(config, folder)
    yield from _sequence_problems(plan, shape)
    yield from _tokenizer_problems(folder, shape)
    yield from _expert_problems(config, folder)
    yield from _checkpoint_problems(plan, shape)
    if config.model.lora_configs:
        from trinity.launcher.adapter import adapter_problems

        yield from adapter_problems(config)


def _number_format_problems(config: Config, folder: Path) -> Iterator[Problem]:
    """``dtype: auto`` is the model folder's own, and engines take only what they run."""
    model, own = config.explorer.rollout_model, config.trainer.dtype
    if not config.mode.pairs or model.engine_type is not EngineType.TORCH or model.dtype != "auto":
        return
    found = _read_whole(folder / "config.json")
    saved = str(found.get("dtype") or found.get("torch_dtype") or "float32")
    if found and saved != own:
        message = f"The model folder's own is {saved}, but `trainer.dtype` is {own}."
        yield Problem("explorer.rollout_model.dtype", message, f"Set `dtype: {own}`.", "auto")


def _expert_problems(config: Config, folder: Path) -> Iterator[Problem]:
    if not config.algorithm.enable_router_replay:
        return
    found = _read_whole(folder / "config.json")
    found = found.get("text_config", found)
    if found and not any(name in found for name in EXPERT_COUNTS):
        why = f"The model ({found.get('model_type')}) has no experts to which tokens are routed."
        yield Problem("algorithm.enable_router_replay", why, "Remove it.", "true")


def _sequence_problems(plan: RunPlan, shape: dict[str, Any]) -> Iterator[Problem]:
    trainer = plan.config.trainer
    size = trainer.ulysses_sequence_parallel_size
    ranks = plan.num_ranks
    heads = int(shape.get("num_attention_heads") or 0)
    keys = int(shape.get("num_key_value_heads") or heads)
    working = [n for n in range(1, ranks + 1) if ranks % n == 0 and divides(n, heads, keys)]
    if size not in working:
        message = f"{size} ranks share a sequence, and the trainer has {ranks}."
        if ranks % size == 0:
            message = (
                f"{size} ranks share a sequence, but can't share the model's {heads} attention "
                f"heads and {keys} key heads evenly."
            )
        choice = "1" if working == [1] else f"one of {', '.join(map(str, working))}"
        yield Problem(_SEQUENCE, message, f"Set it to {choice}.", size)
    elif not plan.gpus.total:
        yield from batch_problems(plan.config, max(ranks // ranks_per_row(trainer), 1))


def divides(size: int, heads: int, keys: int) -> bool:
    """Whether ``size`` ranks can share the heads of a model (0 where they are not known)."""
    return heads % size == 0 and (keys % size == 0 or size % keys == 0)


def _tokenizer_problems(folder: Path, shape: dict[str, Any]) -> Iterator[Problem]:
    rows = int(shape.get("vocab_size") or 0)
    highest = _highest_token(folder)
    if rows and highest >= rows:
        message = (
            f"The tokenizer has ids up to {highest}, but the embedding has {rows} rows "
            "(vocab_size in config.json)."
        )
        fix = "Use the tokenizer of this model, or resize the model's embeddings to fit."
        yield Problem("model.model_path", message, fix, str(folder))


def _highest_token(folder: Path) -> int:
    """The largest id in the files of a tokenizer; -1 if none tells one."""
    whole, config = _read(folder / "tokenizer.json"), _read(folder / "tokenizer_config.json")
    vocabulary = (whole.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    is_counted = isinstance(vocabulary, list)
    ids = range(len(vocabulary)) if is_counted else vocabulary.values()
    added = [token["id"] for token in whole.get("added_tokens") or []]
    added += map(int, config.get("added_tokens_decoder") or {})
    return max([*ids, *added, *_read(folder / "added_tokens.json").values()], default=-1)


def _checkpoint_problems(plan: RunPlan, shape: dict[str, Any]) -> Iterator[Problem]:
    """A checkpoint that the run would go on from, and can't."""
    found = layout.find_latest(plan.job.path).folder
    if found is None:
        return
    model = plan.config.model
    fix = "Set `continue_from_checkpoint: false`, give the job another name, or correct the model."
    if trouble := _other_shape(found / layout.ACTOR, shape):
        message = f"The job's checkpoint {found.name} is of another architecture: {trouble}."
        yield Problem("model.model_path", message, fix, model.model_path)
        return
    yield from _format_problems(plan.config, found)
    was_adapter = (found / layout.ACTOR / layout.LORA_ADAPTER).is_dir()
    is_adapter = bool(model.lora_configs)
    if (found / layout.ACTOR).is_dir() and was_adapter != is_adapter:
        kinds = {True: "an adapter", False: "a whole model"}
        message = (
            f"The job's checkpoint {found.name} is of {kinds[was_adapter]}, and the file asks for "
            f"{kinds[is_adapter]}."
        )
        yield Problem("model.lora_configs", message, fix)
    if needs_critic(plan.config):
        yield from _critic_problems(plan.config, found)


def _format_problems(config: Config, checkpoint: Path) -> Iterator[Problem]:
    """Megatron's checkpoints are read by Megatron, all others by all other trainers."""
    actor, strategy = checkpoint / layout.ACTOR, config.trainer.trainer_strategy
    was_megatron = layout.dist_checkpoint(actor).is_dir()
    is_megatron = strategy is TrainerStrategy.MEGATRON
    if actor.is_dir() and was_megatron != is_megatron:
        whose = "Megatron's, which no other trainer reads" if was_megatron else "not Megatron's"
        message = f"The job's checkpoint {checkpoint.name} is {whose}."
        fix = (
            "Go on with the strategy that wrote it, or give the job another name and start from "
            "what `trinity convert` makes of it, by `model.model_path`."
        )
        yield Problem("trainer.trainer_strategy", message, fix, strategy.value)


def _critic_problems(config: Config, checkpoint: Path) -> Iterator[Problem]:
    critic = checkpoint / layout.CRITIC
    if not critic.is_dir():
        message = (
            f"The job's checkpoint {checkpoint.name} has no critic, which "
            f"{config.algorithm.algorithm_type} goes on with."
        )
        fix = "Set `continue_from_checkpoint: false`, or give the job another name."
        yield Problem("algorithm.algorithm_type", message, fix, config.algorithm.algorithm_type)
        return
    path = config.model.critic_model_path or config.model.model_path
    trouble = _other_shape(critic, _read(Path(path).expanduser() / "config.json"))
    if trouble:
        message = f"The critic of {checkpoint.name} is of another architecture: {trouble}."
        fix = "Correct the critic's model, or give the job another name."
        yield Problem("model.critic_model_path", message, fix, path)


def _other_shape(saved_in: Path, shape: dict[str, Any]) -> str | None:
    """Where a saved model and a model's ``config.json`` differ, or None."""
    saved = _read(saved_in / layout.HUGGING_FACE / "config.json")
    for name in _SHAPE:
        if name in saved and name in shape and saved[name] != shape[name]:
            return f"its {name} is {saved[name]}, and the model's is {shape[name]}"
    return None


def _read(path: Path) -> dict[str, Any]:
    """A JSON file of a model folder, its text part if it has several; {} if there is none."""
    found = _read_whole(path)
    text = found.get("text_config")
    return text if isinstance(text, dict) else found


def _read_whole(path: Path) -> dict[str, Any]:
    """A JSON file; {} if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
