"""Adapters that others wrote: what is wrong with them is told before memory is taken for them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.toy import tiny_config
from trinity.common.models.adapter_files import CONFIG, WEIGHTS, rank_in, read_settings
from trinity.common.models.adapters import AdapterFolder, AdapterSettings, add_adapter_inplace


def toy():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(tiny_config())


@pytest.fixture
def folder(tmp_path):
    model = toy()
    targets = ("q_proj", "v_proj")
    add_adapter_inplace(model, AdapterSettings(rank=4, alpha=8, target_modules=targets))
    AdapterFolder.of(model, model.named_parameters()).write(tmp_path)
    return tmp_path


def edit(folder, **changes):
    found = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(found | changes))


def test_what_was_written_is_read(folder):
    found = read_settings(folder)
    assert rank_in(folder) == 4 and found["lora_alpha"] == 8
    assert set(found["target_modules"]) == {"q_proj", "v_proj"}
    add_adapter_inplace(toy(), AdapterSettings(path=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": None}, "r: Input should be a valid integer"),
        ({"r": "eight"}, "r: "),
        ({"r": 0}, "r: Input should be greater"),
        ({"r": 10**9}, r"rank 1000000000 by its adapter_config\.json, .* widest update has 4"),
        ({"rank_pattern": {"q_proj": 10**9}}, "rank 1000000000"),
        ({"rank_pattern": [3]}, "rank_pattern: "),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"target_modules": 5}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
        ({"peft_type": "IA3"}, "of the kind IA3"),
        ({"use_dora": True}, "use_dora: True"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder, changes, message):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=message):
        rank_in(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_file_that_holds_no_settings_is_named(folder, text):
    (folder / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"adapter_config\.json is not PEFT's"):
        rank_in(folder)


def test_weights_that_cannot_be_read_are_named(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors can't be read"):
        rank_in(folder)
    save_file({"other": torch.zeros(1)}, folder / WEIGHTS)
    with pytest.raises(ValueError, match="holds no update"):
        rank_in(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError):
        rank_in(folder)


def test_an_update_that_would_be_left_out_is_refused(folder):
    edit(folder, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"v_proj.*no place"):
        add_adapter_inplace(toy(), AdapterSettings(path=str(folder)))
    found = load_file(folder / WEIGHTS)
    save_file({name: w for name, w in found.items() if "v_proj" not in name}, folder / WEIGHTS)
    add_adapter_inplace(toy(), AdapterSettings(path=str(folder)))
    edit(folder, target_modules="(")
    with pytest.raises(ValueError, match="regular expression"):
        add_adapter_inplace(toy(), AdapterSettings(path=str(folder)))
