"""`Critic`: a value of the state before each trained token, by a model with a value head."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForTokenClassification, PreTrainedModel

from trinity.common.models.loading import has_weights
from trinity.trainer.backends.torch.packed_model import PackedModel, TokenOutputs
from trinity.trainer.backends.torch.packing import TrainedTokens
from trinity.trainer.batch import TrainBatch

_ONE_CHUNK = 1 << 40
_NO_DROPOUT = ("classifier_dropout", "hidden_dropout", "summary_dropout_prob")


class Critic(PackedModel):
    """Gives ``values``, computed from the hidden state that also predicts the token."""

    def __init__(self, model: PreTrainedModel, shares_prefixes: bool = True) -> None:
        super().__init__(model, model.base_model, shares_prefixes)

    @property
    def chunk_size(self) -> int:
        return _ONE_CHUNK

    def outputs(
        self, hidden: Tensor, trained: TrainedTokens, batch: TrainBatch, entropy: bool
    ) -> TokenOutputs:
        score: nn.Module = self.model.get_submodule("score")
        weights: dict[str, Tensor] = dict(score.named_parameters())
        if not self.trains_head:
            weights = {name: weight.detach() for name, weight in weights.items()}
        values = functional_call(score, weights, (hidden,))
        return TokenOutputs(trained, {"values": values.squeeze(-1).float()})


def load_value_model(
    path: str | Path,
    seed: int,
    *,
    trust_remote_code: bool = False,
    config_overrides: Mapping[str, object] | None = None,
) -> PreTrainedModel:
    """A float32 model with a value head of width 1, for the critic.

    Of a folder that holds a language model, the value head is made up from ``seed``; of one
    without weights, all is.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    for name, value in {
        "num_labels": 1,
        **dict.fromkeys(_NO_DROPOUT, 0.0),
        **(config_overrides or {}),
    }.items():
        setattr(config, name, value)
    options = {"trust_remote_code": trust_remote_code, "dtype": torch.float32}
    folder = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if folder.is_dir() and not has_weights(folder):
            model = AutoModelForTokenClassification.from_config(config, **options)
        else:
            model = AutoModelForTokenClassification.from_pretrained(path, config=config, **options)
    _check_head(model, path)
    return model


def _check_head(model: PreTrainedModel, path: str | Path) -> None:
    if not hasattr(model, "score"):
        raise ValueError(
            f"critic_model_path is {str(path)!r}: {type(model).__name__} has no value head that "
            "is known here. Use a model of a Llama-like architecture as the critic."
        )
