"""The page of the Studio, drawn without a browser."""

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

import trinity.manager

PAGE = str(Path(trinity.manager.__path__[0]) / "config_manager.py")


@pytest.fixture
def page() -> AppTest:
    app = AppTest.from_file(PAGE, default_timeout=300)
    app.run()
    assert not app.exception
    return app


def shown(app: AppTest) -> dict[str, Any]:
    return yaml.safe_load(app.code[0].value) or {}


def fill(app: AppTest, **values: Any) -> AppTest:
    for key, value in values.items():
        app.session_state[key] = value
    app.run()
    assert not app.exception
    return app


REQUIRED = {
    "model_path": "/models/tiny",
    "max_prompt_tokens": "64",
    "max_response_tokens": "64",
    "taskset_path": "/data/tasks",
    "algorithm_type": "grpo",
    "repeat_times": "8",
    "gpu_per_node": 2,
    "node_num": 1,
}


def test_nothing_but_settings_is_shown(page: AppTest) -> None:
    for mode in ("Beginner", "Expert"):
        page.radio(key="_studio_mode").set_value(mode).run()
        assert not [text.value for text in page.markdown if "None" in text.value]


def test_a_beginner_is_told_what_is_missing_and_gets_a_valid_file(page: AppTest, tmp_path) -> None:
    assert any("model.model_path" in error.value for error in page.error)
    assert any("taskset_path" in warning.value for warning in page.warning)
    fill(page, **REQUIRED)
    assert not page.error
    assert [done.value for done in page.success] == ["This file is valid."]
    assert shown(page)["algorithm"] == {"algorithm_type": "grpo", "repeat_times": 8}
    page.text_input(key="_studio_path").set_value(str(tmp_path / "mine.yaml"))
    page.button(key="_studio_save").click().run()
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text()) == shown(page)


def test_the_batch_size_follows_the_trainers_gpus(page: AppTest) -> None:
    assert "train_batch_size" not in shown(page).get("buffer", {})
    fill(page, **{**REQUIRED, "gpu_per_node": 4})
    assert shown(page)["buffer"]["train_batch_size"] == 48
    page.number_input(key="train_batch_size").set_value(96).run()
    assert shown(page)["buffer"]["train_batch_size"] == 96
    fill(page, gpu_per_node=5)
    assert shown(page)["buffer"]["train_batch_size"] == 128


def test_an_expert_sees_every_section_and_keeps_the_values(page: AppTest) -> None:
    fill(page, **REQUIRED)
    page.radio(key="_studio_mode").set_value("Expert").run()
    assert not page.exception
    assert [tab.label for tab in page.tabs] == [
        "Model",
        "Buffer",
        "Explorer and Synchronizer",
        "Trainer",
    ]
    assert page.number_input(key="gpu_per_node").label == "GPU per node"
    assert page.selectbox(key="trainer_trainer_type").label == "Trainer type"
    page.checkbox(key="eval_on_startup").uncheck()
    page.selectbox(key="sync_style").select("trainer_driven")
    page.text_input(key="eval_taskset_path").set_value("/data/eval")
    page.text_input(key="kl_loss_fn_args").set_value("{kl_coef: 0.01}")
    page.run()
    page.radio(key="_studio_mode").set_value("Beginner").run()
    file = shown(page)
    assert file["explorer"] == {"eval_on_startup": False}
    assert file["synchronizer"] == {"sync_style": "trainer_driven"}
    assert file["buffer"]["explorer_input"]["eval_tasksets"] == [{"path": "/data/eval"}]
    assert file["algorithm"]["kl_loss_fn_args"] == {"kl_coef": 0.01}
    assert file["model"]["model_path"] == "/models/tiny"
