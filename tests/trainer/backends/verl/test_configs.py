"""Our settings and veRL's keys as veRL's config objects; the models come from folders."""

import pytest

from tests.trainer.backends.verl.engines import for_verl, settings
from tests.trainer.toy import model_folder

pytest.importorskip("verl")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    from trinity.trainer.backends.verl.compat import load_engines

    load_engines("cpu")


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
    check_keys(keys)
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
        check_keys({"critic.optim.num_cycle": 1})


def test_megatron_is_refused():
    from trinity.common.errors import TrinityError
    from trinity.trainer.backends.verl.compat import require_verl

    require_verl("fsdp2")
    with pytest.raises(TrinityError, match="megatron-core"):
        require_verl("megatron")
