"""Environment variables with addresses and keys of outside services, for a cluster that is joined.

A cluster that the run starts has this process's environment. One that was started elsewhere has
its own, and is told only what the configuration names: Ray writes it into its logs there.
"""

import os
from collections.abc import Iterable, Mapping

from trinity.common.config import Config
from trinity.common.constants import EngineType


def service_variables(
    configs: Iterable[Config], env: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Those of the services that ``configs`` (filled in) ask, as far as ``env`` has them.

    Tinker's key is not among them: it enters no log.
    """
    names: set[str] = set()
    for config in configs:
        for model in (config.explorer.rollout_model, *config.explorer.auxiliary_models):
            if model.engine_type is EngineType.OPENAI:
                service = model.external_model_config
                names |= {service.base_url_env, service.api_key_env}
            elif model.engine_type is EngineType.TINKER:
                names.add("TINKER_BASE_URL")
    return {name: env[name] for name in sorted(names) if name in env}
