"""A veRL launch (script or YAML) -> a YAML file of ours, each line naming where it came from."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, TypeVar

from trinity.common.config.algorithm_table import GROUP_ADVANTAGES
from trinity.common.config.commented_yaml import CommentedTree
from trinity.common.config.verl.given import read_launch
from trinity.common.config.verl.keys import VERL_KEYS, Use
from trinity.common.config.verl.launch_table import (
    ADVANTAGES,
    IMPORTS,
    KL_NAMES,
    PREFIXES,
    Import,
)
from trinity.common.errors import ConfigError, Problem

_SPLITS = frozenset(("train", "test", "validation", "val", "dev"))
_SHARE_OF_ENGINES = 4
_INPUT = "buffer.explorer_input"
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

_MINI, _TRAIN = f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"
_COUNT, _PARALLEL = f"{_ROLLOUT}.n", f"{_ROLLOUT}.tensor_model_parallel_size"
_NODES, _GPUS = "trainer.nnodes", "trainer.n_gpus_per_node"
_NUMBERS = {_MINI: 256, _TRAIN: 1024, _COUNT: 1, _PARALLEL: 1, _NODES: 1, _GPUS: 8}
"""Key that is calculated with -> veRL's own default of it."""

_WITH_DEFAULT = re.compile(r"\$\{oc\.env:\w+,0*([1-9]\d*)\}")

T = TypeVar("T")


@dataclass
class Imported:
    """The file, and what veRL had that it has not: key, value and why."""

    tree: CommentedTree = field(default_factory=CommentedTree)
    left_out: list[tuple[str, object, str]] = field(default_factory=list)
    to_check: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The YAML file, with what was left out as comments at its end."""
        lines = [f"# To check: {_on_a_line(note)}" for note in self.to_check]
        lines += [
            f"# No counterpart: {key}={_on_a_line(value)} ({why})"
            for key, value, why in self.left_out
        ]
        return self.tree.text() + ("\n" + "\n".join(lines) + "\n" if lines else "")


def import_verl(text: str) -> Imported:
    """Turn a veRL launch script, or a veRL YAML file, into a file of ours.

    Raises:
        ConfigError: The text holds neither a veRL command nor veRL's YAML.
    """
    given, unread = read_launch(text)
    if not given:
        message = "There is neither a veRL command (`python3 -m verl.trainer.main_ppo key=value "
        message += "...`) nor a veRL YAML in it."
        raise ConfigError([Problem("", message, "Pass a launch script or a veRL YAML file.")])
    work = _Import(given)
    result = work.run()
    result.to_check += [f"{word!r} was not understood" for word in unread]
    return result


class _Import:
    """One import: takes veRL's keys one by one, and those that belong together by a rule."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.out = Imported()
        self._done: set[str] = set()

    def run(self) -> Imported:
        rules: list[Callable[[], None]] = [
            self._places,
            self._algorithm,
            self._model,
            self._cluster,
            self._batches,
            self._data,
            self._explorer,
            self._synchronizer,
            self._trainer,
            self._monitor,
            self._rest,
        ]
        for rule in rules:
            rule()
        return self.out

    def _get(self, key: str, default: Any = None) -> Any:
        self._done.add(key)
        value = self.given.get(key)
        return default if value is None else value

    def _number(self, key: str) -> int:
        """The whole number at ``key``. Where only a shell knows it, a default stands in."""
        value = self._get(key, _NUMBERS[key])
        if type(value) is int and value > 0:
            return value
        found = _WITH_DEFAULT.fullmatch(str(value))
        default, whose = (int(found[1]), "its") if found else (_NUMBERS[key], "veRL's")
        note = f"{key} is {value!r}, no whole number above 0: {whose} default {default} stands in"
        if note not in self.out.to_check:
            self.out.to_check.append(note)
        return default

    def _put(self, ours: str, value: Any, *keys: str, note: str = "") -> None:
        parts = [f"{key}={_show(self.given[key])}" for key in keys if key in self.given]
        comment = ", ".join(parts) + (f" ({note})" if note and parts else note)
        self.out.tree.set(ours, value, comment)
        self._done.update(keys)

    def _plain(self, *keys: str) -> None:
        """Keys that only have another name here, in this order."""
        for key in keys:
            if key in self.given:
                self._one(key, IMPORTS[key])

    def _one(self, key: str, entry: Import) -> None:
        value = self.given[key]
        if value is None or not entry.ours:
            self._done.add(key)
            if not entry.ours:
                self.out.left_out.append((key, value, entry.why))
            return
        if entry.values and _entry(entry.values, value, None) is None:
            known = ", ".join(map(str, entry.values))
            self.out.left_out.append((key, value, f"only {known} have a counterpart"))
            self._done.add(key)
            return
        for ours in filter(None, (entry.ours, entry.also)):
            self._put(ours, entry.values.get(value, value) if entry.values else value, key)

    def _places(self) -> None:
        self._plain("trainer.project_name", "trainer.experiment_name")
        key = "trainer.default_local_dir"
        self._put("checkpoint_root_dir", self._get(key, "./checkpoints"), key)
        self._plain("trainer.resume_mode")

    def _algorithm(self) -> None:
        key = "algorithm.adv_estimator"
        estimator = self._get(key, "gae")
        kind, advantage = _entry(ADVANTAGES, estimator, ("grpo", ""))
        if self._get("algorithm.use_kl_in_reward", False):  # which only the trainer knows
            advantage = GROUP_ADVANTAGES.get(advantage) or advantage
        self._put("algorithm.algorithm_type", kind, key)
        self._put("algorithm.repeat_times", self._number(_COUNT), _COUNT)
        for name in [key for key in self.given if key.startswith(f"{_ACTOR}.optim.")]:
            self._optimizer(name)
        if advantage:
            self._put("algorithm.advantage_fn", advantage, key)
        else:
            why = f"only {', '.join(ADVANTAGES)} have a counterpart; grpo stands in"
            self.out.left_out.append((key, estimator, why))
        for name in ("gamma", "lam"):
            if f"algorithm.{name}" in self.given:
                self._advantage_argument(name, advantage)
        self._kl_in_reward()
        self._kl_in_loss()
        self._losses()

    def _optimizer(self, key: str) -> None:
        entry = VERL_KEYS.get(key)
        if entry is not None and entry.use is Use.OWN:
            if self.given[key] is not None:
                self._put(entry.ours, self.given[key], key)
            self._done.add(key)

    def _advantage_argument(self, name: str, advantage: str) -> None:
        key = f"algorithm.{name}"
        if advantage == "ppo" or (advantage == "reinforceplusplus" and name == "gamma"):
            self._put(f"algorithm.advantage_fn_args.{name}", self.given[key], key)
            return
        self._done.add(key)
        self.out.left_out.append((key, self.given[key], f"{advantage} takes no {name}"))

    def _kl_in_reward(self) -> None:
        switch, kind = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
        name = _entry(KL_NAMES, self._get(kind, "kl"), "k1") if self._get(switch, False) else "none"
        if switch in self.given:
            sources = (switch, kind) if name != "none" else (switch,)
            self._put("algorithm.kl_penalty_fn", name, *sources)
        parts = ("kl_coef", "type", "horizon", "target_kl")
        keys = [f"algorithm.kl_ctrl.{part}" for part in parts]
        if name != "none":
            self._plain(*keys)
            return
        for key in (kind, *keys):
            if key in self.given:
                self._done.add(key)
                self.out.left_out.append((key, self.given[key], "there is no KL in the reward"))

    def _kl_in_loss(self) -> None:
        switch, kind = f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_type"
        coefficient = f"{_ACTOR}.kl_loss_coef"
        if not self._get(switch, False):
            self._put("algorithm.kl_loss_fn", "none", switch, note=self._default_note(switch))
            for key in (kind, coefficient):
                if key in self.given:
                    self._done.add(key)
                    self.out.left_out.append((key, self.given[key], "there is no KL loss"))
            return
        name = _entry(KL_NAMES, self._get(kind, "low_var_kl"), "low_var_kl")
        self._put("algorithm.kl_loss_fn", name, switch, kind)
        value = self._get(coefficient, 0.001)
        self._put("algorithm.kl_loss_fn_args.kl_coef", value, coefficient)

    def _default_note(self, key: str) -> str:
        return "" if key in self.given else f"veRL's default of {key}"

    def _losses(self) -> None:
        names = ("entropy_coeff", "clip_ratio", "clip_ratio_low", "clip_ratio_high")
        more = ("clip_ratio_c", "loss_agg_mode", "policy_loss.loss_mode")
        self._plain(*(f"{_ACTOR}.{name}" for name in (*names, *more)))
        key = "algorithm.norm_adv_by_std_in_grpo"
        if self._get(key, True) is False:
            why = "the GRPO advantage divides by the spread; use `advantage_fn: opmd` for r - mean"
            self.out.left_out.append((key, False, why))

    def _model(self) -> None:
        self._plain("actor_rollout_ref.model.path", "critic.model.path")
        self._plain("data.max_prompt_length", "data.max_response_length")
        self._plain(f"{_ROLLOUT}.max_model_len", "data.filter_overlong_prompts")
        names = ("temperature", "top_p", "top_k")
        self._plain(*(f"{_ROLLOUT}.{name}" for name in names))
        rank = self._get("actor_rollout_ref.model.lora_rank", 0)
        if rank:
            self._lora()
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            self._done.add(f"actor_rollout_ref.model.{name}")

    def _lora(self) -> None:
        for name in ("lora_rank", "lora_alpha", "target_modules"):
            key = f"actor_rollout_ref.model.{name}"
            if self.given.get(key) is not None:
                if "lora_configs" not in self.out.tree.root.setdefault("model", {}):
                    self.out.tree.root["model"]["lora_configs"] = [{}]
                self._put(f"model.lora_configs.0.{name}", self.given[key], key)

    def _cluster(self) -> None:
        self._put("cluster.node_num", self._number(_NODES), _NODES)
        self._put("cluster.gpu_per_node", self._number(_GPUS), _GPUS)

    def _batches(self) -> None:
        self._plain("trainer.total_epochs", "trainer.total_training_steps")
        mini, count = self._number(_MINI), self._number(_COUNT)
        self._put("buffer.batch_size", mini, _MINI, note=self._default_note(_MINI))
        note = f"{mini} * {count}"
        self._put("buffer.train_batch_size", mini * count, _MINI, _COUNT, note=note)

    def _data(self) -> None:
        for key, kind in (("data.train_files", "tasksets"), ("data.val_files", "eval_tasksets")):
            files = self._get(key, [])
            files = files if isinstance(files, list) else [files]
            if files:
                items = self.out.tree.root["buffer"].setdefault("explorer_input", {})
                items[kind] = [{} for _ in files]
            for index, file in enumerate(files):
                self._taskset(f"{_INPUT}.{kind}.{index}", str(file), key)
        if "tasksets" not in self.out.tree.root["buffer"].get("explorer_input", {}):
            self.out.to_check.append("no training data is named (data.train_files)")

    def _taskset(self, where: str, file: str, key: str) -> None:
        is_eval = "eval_tasksets" in where
        path, split = PurePosixPath(file), "train"
        if path.stem in _SPLITS:
            path, split = path.parent, path.stem
        name = path.name or path.stem
        put = self.out.tree.set
        put(f"{where}.name", f"{name}_eval" if is_eval else name)
        put(f"{where}.storage_type", "file")
        put(f"{where}.path", str(path), f"{key}: {file}")
        put(f"{where}.split", split)
        for field_name, default in (("prompt_key", "prompt"), ("response_key", "answer")):
            source = f"data.{field_name}"
            note = "check; veRL's own data has reward_model.ground_truth"
            note = "check the columns" if field_name == "prompt_key" else note
            value = self._get(source, default)
            self._put(f"{where}.format.{field_name}", value, source, note=note)
        if self._get("data.image_key") is not None:
            self._put(f"{where}.format.image_key", self.given["data.image_key"], "data.image_key")
        if not is_eval and self._get("data.shuffle", False):
            self._put(f"{where}.data_selector.selector_type", "shuffle", "data.shuffle")
        if is_eval:
            self._eval_sampling(where)

    def _eval_sampling(self, where: str) -> None:
        prefix = f"{_ROLLOUT}.val_kwargs"
        if f"{prefix}.n" in self.given:
            self._put(f"{where}.repeat_times", self.given[f"{prefix}.n"], f"{prefix}.n")
        for name in ("temperature", "top_p", "top_k"):
            if self._get(f"{prefix}.{name}") is not None:
                key = f"{prefix}.{name}"
                self._put(f"{where}.rollout_args.{name}", self.given[key], key)
        if self._get(f"{prefix}.do_sample") is False:
            self._put(f"{where}.rollout_args.temperature", 0, f"{prefix}.do_sample")

    def _explorer(self) -> None:
        key = "trainer.test_freq"
        interval = self._get(key, -1)
        if isinstance(interval, int) and interval > 0:
            self._put("explorer.eval_interval", interval, key)
        elif key in self.given:
            self.out.left_out.append((key, interval, "leave out `eval_tasksets` for no evaluation"))
        self._plain("trainer.val_before_train")
        self._engines()
        self._reward_model()

    def _engines(self) -> None:
        size = self._number(_PARALLEL)
        share = max(self._num_gpus // _SHARE_OF_ENGINES // size, 1)
        note = "veRL shares all GPUs; here engines have their own, a quarter of them"
        self.out.tree.set("explorer.rollout_model.engine_num", share, note)
        self._put("explorer.rollout_model.tensor_parallel_size", size, _PARALLEL)
        name = f"{_ROLLOUT}.name"
        if self._get(name, "vllm") == "vllm":
            if name in self.given:
                self._put("explorer.rollout_model.engine_type", "vllm", name)
        else:
            self.out.left_out.append((name, self.given[name], "vLLM is the engine on GPUs"))
        names = ("gpu_memory_utilization", "dtype", "enforce_eager", "enable_chunked_prefill")
        more = ("max_num_batched_tokens", "max_num_seqs")
        self._plain(*(f"{_ROLLOUT}.{name}" for name in (*names, *more)))

    @property
    def _num_gpus(self) -> int:
        return self._number(_NODES) * self._number(_GPUS)

    def _reward_model(self) -> None:
        switch, path = "reward_model.enable", "reward_model.model.path"
        if not self._get(switch, False) or path not in self.given:
            why = "there is no reward model"
            left = [key for key in (switch, path) if key in self.given]
            self.out.left_out += [(key, self.given[key], why) for key in left]
            self._done.update(left)
            return
        self.out.tree.root["explorer"]["auxiliary_models"] = [{}]
        where = "explorer.auxiliary_models.0"
        self._put(f"{where}.model_path", self.given[path], path, switch)
        share = max(self._num_gpus // _SHARE_OF_ENGINES, 1)
        self.out.tree.set(f"{where}.engine_num", share, "a quarter of all GPUs")
        self.out.tree.set(f"{where}.tensor_parallel_size", 1)
        note = "a workflow has to ask the reward model (explorer.auxiliary_models)"
        self.out.to_check.append(note)

    def _synchronizer(self) -> None:
        self.out.tree.set("synchronizer.sync_style", "fixed", "veRL trains in lock-step")
        self.out.tree.set("synchronizer.sync_offset", 0, "veRL trains on what it just sampled")
        tasks, part = self._number(_TRAIN), self._number(_MINI)
        interval = max(tasks // part, 1)
        self._put("synchronizer.sync_interval", interval, _TRAIN, _MINI, note=f"{tasks} / {part}")
        if tasks % part:
            self.out.to_check.append(f"{_TRAIN}={tasks} is no multiple of {_MINI}={part}")

    def _trainer(self) -> None:
        key = "trainer.save_freq"
        value = self._get(key, -1)
        if type(value) is int and key in self.given:
            self._put("trainer.save_interval", max(value, 0), key)
        elif key in self.given:
            self.out.left_out.append((key, value, "no whole number"))
        names = ("strategy", "use_dynamic_bsz", "ppo_max_token_len_per_gpu", "grad_clip")
        more = ("ppo_epochs", "ulysses_sequence_parallel_size")
        self._plain(*(f"{_ACTOR}.{name}" for name in (*names, *more)))
        for key in self.given:
            entry = VERL_KEYS.get(key)
            takes = entry is not None and entry.use is not Use.REFUSED
            if takes and key not in self._done and key not in IMPORTS:
                self._put(f"trainer.trainer_config.{key}", self.given[key], key)

    def _monitor(self) -> None:
        key = "trainer.logger"
        loggers = self._get(key, ["console"])
        loggers = loggers if isinstance(loggers, list) else [loggers]
        known = [name for name in loggers if name in ("wandb", "tensorboard", "mlflow", "swanlab")]
        if known:
            self._put("monitor.monitor_type", known[0], key)
        for name in [name for name in loggers if name not in ("console", *known[:1])]:
            self.out.left_out.append((key, name, "one monitor a run"))

    def _rest(self) -> None:
        for key, value in self.given.items():
            if key in self._done:
                continue
            if key in IMPORTS:
                self._one(key, IMPORTS[key])
                continue
            prefix = next((name for name in PREFIXES if key.startswith(name)), None)
            why = PREFIXES[prefix].why if prefix else ""
            self.out.left_out.append((key, value, why or "trinity has no such setting"))


def _entry(table: Mapping[Any, T], value: object, default: T) -> T:
    """What ``table`` has for a value of the file's, which may be of any kind."""
    return table.get(value, default) if isinstance(value, Hashable) else default


def _on_a_line(value: object) -> str:
    return " ".join(str(value).split())


def _show(value: object) -> str:
    text = _on_a_line(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
