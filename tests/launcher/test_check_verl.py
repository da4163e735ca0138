import sys
from dataclasses import replace

import pytest

from tests.launcher.test_check_trainer import plan_of
from trinity.launcher import check_verl
from trinity.launcher.check_verl import verl_problems
from trinity.launcher.gpu_needs import GpuNeeds


def test_a_flash_attn_that_does_not_load_is_told_at_start(tmp_path, monkeypatch):
    """The FAQ's error: the module is there, and its compiled part is not."""
    (tmp_path / "flash_attn.py").write_text("import flash_attn_2_cuda\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(check_verl, "unusable_trl", lambda: None)
    plan = plan_of(tmp_path, trainer={"trainer_type": "verl"})
    assert list(verl_problems(plan, {})) == []
    [found] = verl_problems(replace(plan, gpus=GpuNeeds(0, 0, 1, 1)), {})
    assert found.key == "trainer.use_remove_padding"
    assert "flash_attn_2_cuda" in found.message
    assert "pip install flash-attn==2.8.1" in found.fix


@pytest.mark.parametrize(
    ("place", "is_usable"),
    [("experimental/ppo/__init__.py", True), ("__init__.py", True), ("models.py", False)],
)
def test_a_trl_that_stops_verl_is_told_at_start(tmp_path, monkeypatch, place, is_usable):
    """veRL's patch imports one of its classes, which TRL 1.13 and newer lack."""
    monkeypatch.delitem(sys.modules, "trl", raising=False)
    site = tmp_path / "site"
    for name in ("trl/__init__.py", "trl/experimental/ppo/__init__.py", f"trl/{place}"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("raise RuntimeError('TRL was imported')\n")
    (site / "trl" / place).write_text("from a import AutoModelForCausalLMWithValueHead\n")
    (site / "trl-1.16.0.dist-info").mkdir()
    (site / "trl-1.16.0.dist-info" / "METADATA").write_text("Name: trl\nVersion: 1.16.0\n")
    monkeypatch.syspath_prepend(site)
    found = list(verl_problems(plan_of(tmp_path, trainer={"trainer_type": "verl"}), {}))
    assert bool(found) is not is_usable
    for problem in found:
        assert problem.key == "trainer.trainer_type"
        assert "TRL 1.16.0" in problem.message and "pip uninstall trl" in problem.fix
    megatron = {"trainer_type": "verl", "trainer_strategy": "megatron"}
    problems = verl_problems(plan_of(tmp_path, trainer=megatron), {})
    assert not any("TRL" in problem.message for problem in problems), "its engine imports none"
