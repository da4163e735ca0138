"""What the file says of adapters reaches engines and models."""

from tests.launcher.test_check_trainer import plan_of
from trinity.common.models.protocol import NamedAdapter
from trinity.launcher.build_engine import _vllm_settings, model_settings, torch_settings

ASKED = {
    "enable_openai_api": True,
    "enable_runtime_lora_updating": True,
    "lora_modules": [{"name": "polite", "path": "/adapters/polite", "base_model_name": "toy"}],
    "lora_kwargs": {"max_loras": 3},
}


def test_named_adapters_reach_engines_and_the_api(tmp_path):
    for asked in (ASKED, {}):
        plan = plan_of(tmp_path, explorer={"rollout_model": {"engine_type": "torch", **asked}})
        model, has_any = plan.config.explorer.rollout_model, bool(asked)
        vllm = _vllm_settings(plan, model, "engine")
        for engine in (vllm, torch_settings(plan.config, model, 1, "cpu")):
            named = (NamedAdapter("polite", "/adapters/polite", "toy"),) if has_any else ()
            assert engine.named_adapters == named
            assert engine.loads_adapters is engine.has_named_adapters is has_any
        assert vllm.lora_kwargs == asked.get("lora_kwargs", {})
        served = model_settings(plan.config, model)
        assert served.has_named_adapters is served.loads_adapters is has_any
