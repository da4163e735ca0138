import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trinity.launcher.lock import JobRunsError, job_lock


def test_a_second_run_is_told_who_holds_the_job(tmp_path: Path) -> None:
    with (
        job_lock(tmp_path, "trainer"),
        pytest.raises(JobRunsError) as caught,
        job_lock(tmp_path, "trainer"),
    ):
        pass
    text = str(caught.value)
    assert f"process {os.getpid()} on " in text and str(tmp_path) in text
    assert "The trainer of the job" in text and time.strftime("%Y-") in text
    assert caught.value.exit_code == 2


def test_roles_do_not_exclude_each_other(tmp_path: Path) -> None:
    with job_lock(tmp_path, "trainer"), job_lock(tmp_path, "explorer"):
        pass


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), job_lock(tmp_path, "trainer"):
            raise KeyError
    holder = json.loads((tmp_path / ".lock_trainer").read_text())
    assert holder["pid"] == os.getpid()


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from trinity.launcher.lock import job_lock\n"
        "with job_lock(Path(sys.argv[1]), 'trainer'):\n"
        "    print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with (
        pytest.raises(JobRunsError, match=f"process {holder.pid} on"),
        job_lock(tmp_path, "trainer"),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with job_lock(tmp_path, "trainer"):
        pass


def test_an_unreadable_holder_is_another_process(tmp_path: Path) -> None:
    with job_lock(tmp_path, "trainer"):
        (tmp_path / ".lock_trainer").write_text("")
        with pytest.raises(JobRunsError, match="another process"), job_lock(tmp_path, "trainer"):
            pass
