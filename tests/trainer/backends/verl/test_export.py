"""Which of the weights that an engine of veRL gives go out."""

import pytest
import torch

from tests.trainer.toy import model_folder, plain_model

pytest.importorskip("verl")


class Gives:
    """An engine that gives weights of these names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def get_per_tensor_param(self):
        return ((name, torch.ones(2)) for name in self.names), None


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_go_out_once_and_experts_one_by_one(tmp_path, tied):
    from trinity.trainer.backends.verl.compat import load_engines

    load_engines("cpu", "fsdp2")
    from trinity.trainer.backends.verl.model import VerlModel

    model = object.__new__(VerlModel)
    model.plain = plain_model(model_folder(tmp_path / "model", tie_word_embeddings=tied))
    model.dtype = torch.bfloat16
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    model.engine = Gives("model.embed_tokens.weight", expert, "lm_head.weight")
    found = [name for name, _ in model.export()]
    assert found == list(model.engine.names)[: 2 if tied else 3]
