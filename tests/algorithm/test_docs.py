"""The pages about algorithms say what the code does."""

import re
import subprocess
import sys
from pathlib import Path

from trinity.algorithm import POLICY_LOSS_FN
from trinity.algorithm.document import page

DOCS = Path(__file__).parents[2] / "docs"

RUN = """
import sys
sys.path.insert(0, {folder!r})
import spo
spo.test_spo()
from trinity.common.config import derive, load_config
config, _ = derive(load_config({config!r}))
algorithm = config.algorithm
assert (algorithm.policy_loss_fn, algorithm.advantage_fn) == ("spo", "median"), algorithm
assert algorithm.kl_loss_fn == "none", algorithm
print("ran")
"""


def test_the_table_of_algorithms_is_up_to_date(monkeypatch):
    """Whatever other tests have registered."""
    monkeypatch.setitem(POLICY_LOSS_FN._loaded, "of_a_plugin", object)
    written = (DOCS / "algorithms.md").read_text()
    assert written == page(), "run: python -m trinity.algorithm.document"


def test_the_example_of_the_tutorial_runs(tmp_path):
    text = (DOCS / "write_an_algorithm.md").read_text()
    python = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    [yaml] = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "spo.py").write_text("\n\n".join(python))
    (tmp_path / "run.yaml").write_text(yaml)
    code = RUN.format(folder=str(tmp_path), config=str(tmp_path / "run.yaml"))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "ran", found.stderr
