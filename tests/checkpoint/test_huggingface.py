import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.toy import model_folder, plain_model
from trinity.checkpoint import huggingface

TOKENS = torch.arange(3, 30)[None]


@pytest.mark.parametrize("tied", [True, False])
def test_weights_above_the_bound_are_split_over_files_and_load(tmp_path, tied):
    base = model_folder(tmp_path / "base", tie_word_embeddings=tied)
    model, target = plain_model(base), tmp_path / "huggingface"
    huggingface.copy_companions(base, target)
    huggingface.save_weights(model.named_parameters(), target, max_shard_bytes=20_000)
    files = sorted(target.glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(path.stat().st_size < 22_000 for path in files)
    loaded = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, atol=0, rtol=0)
    assert huggingface.has_weights(target)
    files[1].unlink()
    assert not huggingface.has_weights(target)
