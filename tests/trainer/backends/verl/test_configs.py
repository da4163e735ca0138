"""Our settings and veRL's keys as veRL's config objects; the models come from folders."""

import tempfile
from importlib.util import find_spec

import pytest

from tests.trainer.backends.verl.engines import for_verl, settings
from tests.trainer.toy import model_folder, tiny_config
from trinity.trainer.backends.verl.settings import MegatronSizes

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    from trinity.trainer.backends.verl.compat import load_engines

    load_engines("cpu", "fsdp2")


def test_keys_reach_the_config_that_has_them(tmp_path):
    from trinity.trainer.backends.verl.configs import check_keys, configs_of

    keys = {
        "actor_rollout_ref.actor.entropy_checkpointing": True,
        "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": 7,
        "actor_rollout_ref.actor.optim.optimizer": "SGD",
        "actor_rollout_ref.model.override_config": {"attn_implementation": "eager"},
        "actor_rollout_ref.ref.fsdp_config.forward_prefetch": True,
        "critic.model.fsdp_config.reshard_after_forward": False,
        "critic.optim.lr": 5.0,
        "critic.model.external_lib": None,
    }
    check_keys(keys, "fsdp2")
    folder = model_folder(tmp_path / "model", architectures=["LlamaForCausalLM"])
    given = for_verl(settings(folder, has_critic=True), verl=keys)
    actor, ref, critic = (configs_of(role, given, folder) for role in ("actor", "ref", "critic"))
    assert actor.engine.entropy_checkpointing and not ref.engine.entropy_checkpointing
    assert actor.engine.wrap_policy == {"min_num_params": 7}
    assert actor.engine.mixed_precision["param_dtype"] == "fp32"
    assert actor.optimizer.optimizer == "SGD" and critic.optimizer.optimizer == "AdamW"
    assert actor.model.override_config == {"attn_implementation": "eager"}
    assert ref.engine.forward_prefetch and not actor.engine.forward_prefetch
    assert not critic.engine.reshard_after_forward and actor.engine.reshard_after_forward
    assert critic.optimizer.lr == 1e-2, "ours has a key of the same meaning"


def test_a_key_that_no_config_has_is_refused_with_the_nearest():
    from trinity.trainer.backends.verl.configs import check_keys

    with pytest.raises(ValueError, match=r"critic.optim.num_cycle is no setting.*num_cycles"):
        check_keys({"critic.optim.num_cycle": 1}, "fsdp2")


def test_megatron_gets_its_sizes_and_keys_in_configs_of_its_own(tmp_path):
    from trinity.trainer.backends.verl.configs import check_keys, configs_of

    keys = {
        "actor_rollout_ref.actor.megatron.override_transformer_config": {"moe_aux_loss_coeff": 0.1},
        "critic.megatron.use_distributed_optimizer": False,
    }
    check_keys(keys, "megatron")
    with pytest.raises(ValueError, match="fsdp_size is no setting"):
        check_keys({"actor_rollout_ref.actor.fsdp_config.fsdp_size": 2}, "megatron")
    folder = model_folder(tmp_path / "model", architectures=["LlamaForCausalLM"])
    given = settings(folder, has_critic=True, dtype="bfloat16", gradient_checkpointing=True)
    sizes = MegatronSizes(tensor=2, pipeline=3, context=4, sequence_parallel=False)
    own = for_verl(given, strategy="megatron", megatron=sizes, verl=keys)
    actor, ref, critic = (configs_of(role, own, folder) for role in ("actor", "ref", "critic"))
    engine = actor.engine
    assert (engine.tensor_model_parallel_size, engine.pipeline_model_parallel_size) == (2, 3)
    assert engine.context_parallel_size == 4 and not engine.sequence_parallel
    overrides = engine.override_transformer_config
    assert overrides["recompute_granularity"] == "full" and overrides["moe_aux_loss_coeff"] == 0.1
    assert ref.engine.forward_only and not engine.forward_only
    assert engine.use_distributed_optimizer and not critic.engine.use_distributed_optimizer
    assert critic.model.model_type == "value_model" and actor.model.tokenizer.pad_token_id == 0
    assert actor.optimizer.override_optimizer_config["adam_beta2"] == given.optimizer.betas[1]


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_megatron_without_its_packages_names_the_extra():
    from trinity.common.errors import MissingExtraError
    from trinity.trainer.backends.verl.compat import require_verl

    require_verl("fsdp2")
    with pytest.raises(MissingExtraError, match=r"'megatron-core'.*trinity-rft\[megatron\]"):
        require_verl("megatron")


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_a_model_that_can_not_be_made_leaves_no_folder_behind(tmp_path, monkeypatch):
    from trinity.trainer.backends.verl.model import VerlModel

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tiny_config(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    given = settings(str(tmp_path / "model"), dtype="bfloat16")
    with pytest.raises(AssertionError, match="megatron") as caught:
        VerlModel("actor", for_verl(given, strategy="megatron"))
    assert caught.tb and list(tmp_path.glob("trinity_weights_*")) == []
