"""What a cluster that others started is told of outside services."""

from trinity.common.config import Config
from trinity.launcher.service_env import service_variables

HERE = {
    "JUDGE_URL": "http://judge/v1",
    "OPENAI_API_KEY": "of somebody else",
    "TINKER_BASE_URL": "http://tinker",
    "TINKER_API_KEY": "secret",
}


def variables_of(**explorer: object) -> dict[str, str]:
    return service_variables([Config.model_validate({"explorer": explorer})], HERE)


def test_only_what_the_file_names_and_is_set() -> None:
    service = {"model_name": "judge", "base_url_env": "JUDGE_URL", "api_key_env": "JUDGE_KEY"}
    judge = {"engine_type": "openai", "external_model_config": service}
    assert variables_of(auxiliary_models=[judge]) == {"JUDGE_URL": "http://judge/v1"}
    assert variables_of(rollout_model={"engine_type": "vllm"}) == {}


def test_the_key_of_tinker_stays_here() -> None:
    told = variables_of(rollout_model={"engine_type": "tinker"})
    assert told == {"TINKER_BASE_URL": "http://tinker"}
