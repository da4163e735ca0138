from dataclasses import replace

from tests.launcher.test_check_trainer import plan_of
from trinity.launcher.check_verl import verl_problems
from trinity.launcher.plan import GpuNeeds


def test_a_flash_attn_that_does_not_load_is_told_at_start(tmp_path, monkeypatch):
    """The FAQ's error: the module is there, and its compiled part is not."""
    (tmp_path / "flash_attn.py").write_text("import flash_attn_2_cuda\n")
    monkeypatch.syspath_prepend(tmp_path)
    plan = plan_of(tmp_path, trainer={"trainer_type": "verl"})
    assert list(verl_problems(plan, {})) == []
    [found] = verl_problems(replace(plan, gpus=GpuNeeds(0, 0, 1, 1)), {})
    assert found.key == "trainer.use_remove_padding"
    assert "flash_attn_2_cuda" in found.message
    assert "pip install flash-attn==2.8.1" in found.fix
