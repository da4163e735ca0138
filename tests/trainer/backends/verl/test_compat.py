"""What veRL finds of flash-attn decides whether its sequences are packed."""

import pytest

from trinity.trainer.backends.verl.compat import can_pack


@pytest.mark.parametrize(
    ("file", "packs"), [("flash_attn/__init__.py", True), ("flash_attn/cute/__init__.py", False)]
)
def test_flash_attention_4_alone_does_not_pack(tmp_path, monkeypatch, file, packs):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert can_pack("cuda") is packs
    assert not can_pack("cpu")
