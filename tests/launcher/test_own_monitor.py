"""The monitor that docs/metrics.md shows, in a run's place."""

import re
from pathlib import Path

from tests.launcher.test_check_trainer import plan_of
from trinity.launcher.build import Reporters
from trinity.utils.monitor import MONITOR

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_monitor_of_the_docs_gets_all_that_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(MONITOR, "_loaded", dict(MONITOR._loaded))
    [code] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    exec(code, {"__name__": "docs.metrics"})
    args = {"monitor_type": "csv", "monitor_args": {"ending": "txt"}}
    folder = tmp_path / "monitor"
    config = plan_of(tmp_path, monitor={**args, "cache_dir": str(folder)}).config
    reporter = Reporters(config, []).of("trainer")
    reporter.report("trainer", 1, {"loss": 0.5, "lr": 1e-6})
    reporter.rows("replies", [{"reward": 1, "reply": "x"}, {"reward": 2}], 1)
    reporter.close()
    assert (folder / "trainer.txt").read_text() == "1,loss,0.5\n1,lr,1e-06\n"
    assert (folder / "replies_1.csv").read_text() == "reward,reply\n1,x\n2,\n"
