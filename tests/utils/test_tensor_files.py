import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trinity.utils.tensor_files import save_tensors


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o644), (0o700, 0o600), (0o775, 0o664)])
def test_a_file_is_for_those_who_may_read_its_folder(
    tmp_path: Path, folder_mode: int, mode: int
) -> None:
    tmp_path.chmod(folder_mode)
    path = tmp_path / "a.safetensors"
    save_tensors({"w": torch.ones(2)}, path, {"format": "pt"})
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert torch.equal(load_file(path)["w"], torch.ones(2))
