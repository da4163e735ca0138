import os

import pytest
import torch

from tests.common.models.toy import config, model_folder
from trinity.common.models.loading import load_causal_lm
from trinity.engine.vllm import shipping
from trinity.engine.vllm.shipping import expected_shapes, ticket_files
from trinity.synchronizer.channel import CheckpointChannel


def weights(folder, seed=0):
    model, _ = load_causal_lm(folder, "float32", seed)
    return dict(model.named_parameters())


def test_names_and_shapes_are_known_without_weights(tmp_path):
    folder = model_folder(tmp_path)
    expected = {name: tuple(p.shape) for name, p in weights(folder).items()}
    assert expected_shapes(folder) == expected
    untied = model_folder(tmp_path / "untied", model=config(tie_word_embeddings=False))
    assert "lm_head.weight" in expected_shapes(untied)


def test_a_checkpoint_is_one_file_and_used_in_place(tmp_path):
    folder = model_folder(tmp_path / "m")
    ticket = CheckpointChannel(tmp_path / "c").send(1, weights(folder).items())
    shapes = expected_shapes(folder)
    assert list(ticket_files(ticket, shapes, torch.float32)) == [(ticket.payload, True)]
    assert os.path.exists(ticket.payload)


@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), torch.float32, "did not come"),
        (lambda w: w.update({"extra": torch.zeros(1)}), torch.float32, "does not have"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), torch.float32, "came as"),
        (lambda w: None, torch.bfloat16, "came as"),
    ],
)
def test_what_does_not_fit_is_an_error_before_a_file_is_given(tmp_path, change, dtype, message):
    folder = model_folder(tmp_path / "m")
    sent = weights(folder)
    change(sent)
    ticket = CheckpointChannel(tmp_path / "c").send(1, sent.items())
    with pytest.raises(ValueError, match=message):
        next(ticket_files(ticket, expected_shapes(folder), dtype))


def test_buckets_hold_all_in_order_and_end_at_the_limit():
    sent = [(f"w{k}", torch.zeros(k, dtype=torch.uint8)) for k in (60, 50, 30, 200, 10)]
    size = shipping._BUCKET_BYTES
    assert [list(bucket) for bucket in shipping._buckets(sent)] == [[name for name, _ in sent]]
    big = torch.empty(size - 1, dtype=torch.uint8)
    found = [list(b) for b in shipping._buckets([("a", big), ("b", sent[0][1]), ("c", big)])]
    assert found == [["a"], ["b"], ["c"]]


@pytest.mark.ray
def test_weights_in_memory_go_through_shared_memory_bucket_by_bucket(tmp_path):
    from safetensors.torch import load_file

    from trinity.launcher.cluster import ray_cluster
    from trinity.synchronizer.channel import MemoryChannel

    folder = model_folder(tmp_path / "m")
    sent = weights(folder)
    with ray_cluster("local", "test_shipping", {}):
        ticket = MemoryChannel().send(1, sent.items())
        found, paths = {}, []
        for path, is_first in ticket_files(ticket, expected_shapes(folder), torch.float32):
            assert is_first == (not paths)
            found |= load_file(path)
            paths.append(path)
    assert found.keys() == sent.keys()
    assert all(torch.equal(found[name], sent[name]) for name in sent)
    assert not any(os.path.exists(path) for path in paths)
