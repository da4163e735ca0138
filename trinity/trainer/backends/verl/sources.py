"""Where a model's first weights come from: veRL reads them from a folder that has to hold them."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, PretrainedConfig

from trinity.common.models.loading import has_weights, load_causal_lm
from trinity.trainer.backends.torch.critic import load_value_model
from trinity.trainer.backends.verl.settings import VerlEngineSettings
from trinity.trainer.engine import ModelRole


@contextlib.contextmanager
def folder_of(role: ModelRole, settings: VerlEngineSettings) -> Iterator[tuple[str, bool]]:
    """The folder to load from, and whether its weights are made up.

    A folder that holds a config alone is filled as the torch trainer does it, by the same seed,
    in a copy. Megatron reads a critic from a language model.
    """
    path = settings.path_of(role)
    folder = Path(path)
    if not folder.is_dir() or has_weights(folder):
        yield path, False
        return
    copy = Path(tempfile.mkdtemp(prefix="trinity_weights_"))
    try:
        if role == "critic" and not settings.is_megatron:
            model = load_value_model(
                path,
                settings.seed,
                trust_remote_code=settings.trust_remote_code,
                config_overrides=settings.config_overrides,
            )
        else:
            model, _ = load_causal_lm(
                path,
                torch.float32,
                settings.seed,
                trust_remote_code=settings.trust_remote_code,
                config_overrides=settings.config_overrides,
            )
        model.save_pretrained(copy)
        yield str(copy), True
    finally:
        shutil.rmtree(copy)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw what is made up, such as a new value head, as the torch trainer draws it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def make_value_config(config: Any) -> None:
    """Have ``config`` say that the model has a value head, so that veRL loads it with one."""
    assert isinstance(config, PretrainedConfig)
    config.num_labels = 1
    for name in ("classifier_dropout", "hidden_dropout", "summary_dropout_prob"):
        setattr(config, name, 0.0)
    found: Any = AutoModelForTokenClassification._model_mapping[type(config)]
    config.architectures = [found.__name__]
