"""The Config Studio: a page that writes a configuration file. Run by `trinity studio`."""

from __future__ import annotations

import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, cast

import streamlit as st
import yaml

from trinity.common.config.validate import validate_file
from trinity.common.errors import Problem
from trinity.manager.config_registry import (
    CONFIG_GENERATORS,
    buffer_config_manager,
    explorer_config_manager,
    model_config_manager,
    trainer_config_manager,
)
from trinity.manager.config_registry.fields import changed

_COLUMNS = 2
_SECTIONS = ("algorithm", "model", "cluster", "explorer", "synchronizer", "trainer")


class ConfigManager:
    """The page. ``unfinished_fields`` are the settings that can't stay as they are."""

    def __init__(self) -> None:
        self.unfinished_fields: set[str] = set()
        self._state = cast(MutableMapping[str, Any], st.session_state)

    def main(self) -> None:
        """Draw the page."""
        st.set_page_config(page_title="trinity studio", layout="wide")
        CONFIG_GENERATORS.fill(self._state)
        self._state["trainer_gpu_num"] = self._trainer_gpus()
        st.title("trinity studio")
        mode = st.radio("Mode", ["Beginner", "Expert"], horizontal=True, key="_studio_mode")
        left, right = st.columns([3, 2])
        with left:
            show = self.beginner_mode if mode == "Beginner" else self.expert_mode
            show()
        with right:
            self.show_config()

    def beginner_mode(self) -> None:
        """What every run needs, and what most want to change."""
        st.header("Basic Configuration")
        self.get_configs("project", "name", "model_path", "checkpoint_root_dir")
        self.get_configs("algorithm_type", "repeat_times", "taskset_path", "taskset_split")
        self.get_configs("taskset_default_workflow_type", "taskset_default_reward_fn_type")
        self.get_configs("taskset_prompt_key", "taskset_response_key")
        st.header("Important Configuration")
        self.get_configs("max_prompt_tokens", "max_response_tokens", "node_num", "gpu_per_node")
        self.get_configs("rollout_engine_type", "rollout_engine_num")
        self.get_configs("batch_size", "train_batch_size", "total_epochs", "total_steps")
        self.get_configs("lr", "sync_interval", "eval_interval", "trainer_save_interval")

    def expert_mode(self) -> None:
        """All settings, by section."""
        parts = {
            "Model": self._expert_model_part,
            "Buffer": self._expert_buffer_part,
            "Explorer and Synchronizer": self._expert_explorer_part,
            "Trainer": self._expert_trainer_part,
        }
        for tab, draw in zip(st.tabs(list(parts)), parts.values(), strict=True):
            with tab:
                draw()

    def _expert_model_part(self) -> None:
        page = model_config_manager
        self.get_configs(*page.GLOBAL)
        self.get_configs(*page.MODEL)
        self.get_configs(*page.ALGORITHM, *page.OPTIMIZER)
        self.get_configs(*page.CLUSTER)

    def _expert_buffer_part(self) -> None:
        page = buffer_config_manager
        self.get_configs("batch_size", "train_batch_size", "total_epochs", "total_steps")
        st.subheader("Tasks")
        names = (*page.TASKSET, *page.FORMAT, "selector_type", "seed")
        self.get_configs(*(f"taskset_{name}" for name in names))
        st.subheader("Evaluation")
        self.get_configs(*(f"eval_taskset_{name}" for name in (*page.EVAL, *page.FORMAT)))
        st.subheader("Experiences")
        self.get_configs(*(f"experience_{name}" for name in page.EXPERIENCES))

    def _expert_explorer_part(self) -> None:
        page = explorer_config_manager
        self.get_configs(*page.EXPLORER)
        self.get_configs(*(f"rollout_{name}" for name in page.ROLLOUT))
        self.get_configs(*page.SYNCHRONIZER)

    def _expert_trainer_part(self) -> None:
        page = trainer_config_manager
        self.get_configs(*(f"trainer_{name}" for name in page.TRAINER))
        self.get_configs("monitor_type", "monitor_args", "log_level")

    def get_configs(self, *names: str) -> None:
        """Draw settings side by side, those that are not visible left out."""
        shown = CONFIG_GENERATORS.visible(names)
        for start in range(0, len(shown), _COLUMNS):
            row = shown[start : start + _COLUMNS]
            for column, name in zip(st.columns(_COLUMNS), row, strict=False):
                with column:
                    CONFIG_GENERATORS.draw(name, self.unfinished_fields)

    def generate_config(self) -> dict[str, Any]:
        """The file as a tree: what differs from the defaults."""
        state = self._state
        tree = changed(state, "")
        tree |= {name: changed(state, name) for name in _SECTIONS}
        tree["buffer"] = self._gen_buffer_config()
        tree |= {name: changed(state, name) for name in ("monitor", "log")}
        return {name: value for name, value in tree.items() if value not in ({}, "")}

    def _gen_buffer_config(self) -> dict[str, Any]:
        buffer_config = changed(self._state, "buffer")
        if CONFIG_GENERATORS.is_visible("train_batch_size"):
            buffer_config["train_batch_size"] = self._state["train_batch_size"]
        inputs = buffer_config.get("explorer_input", {})
        if "eval_tasksets" in inputs:
            inputs["eval_tasksets"] = list(inputs["eval_tasksets"].values())
        return buffer_config

    def show_config(self) -> None:
        """The file as it would be written, what is wrong with it, and where to write it."""
        st.header("Configuration file")
        text = yaml.safe_dump(self.generate_config(), sort_keys=False, allow_unicode=True)
        if self.unfinished_fields:
            st.warning(f"Not finished: {', '.join(sorted(self.unfinished_fields))}.")
        problems = problems_of(text)
        for problem in problems:
            st.error(f"`{problem.key}`: {problem.message} {problem.fix}")
        if not problems:
            st.success("This file is valid.")
        st.code(text, language="yaml")
        st.download_button("Download", text, file_name="run.yaml", mime="application/yaml")
        path = st.text_input("Save as", value="run.yaml", key="_studio_path")
        if st.button("Save", key="_studio_save"):
            self._save(Path(path).expanduser(), text)

    def _save(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            st.error(f"{path} can't be written: {error.strerror}.")
            return
        st.info(f"Saved. Run it with `trinity run --config {path}`.")

    def _trainer_gpus(self) -> int:
        state = self._state
        total = state["node_num"] * state["gpu_per_node"]
        explorer = state["rollout_engine_num"] * state["rollout_tensor_parallel_size"]
        return max(0, total - explorer) if state["mode"] != "explore" else 0


def problems_of(text: str) -> list[Problem]:
    """All that `trinity validate` would say of a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return validate_file(path).problems


if __name__ == "__main__":
    ConfigManager().main()
