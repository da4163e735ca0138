import asyncio
import os
from pathlib import Path

import pytest

from trinity.workflows.agent import sandbox
from trinity.workflows.agent.sandbox import run_python


async def test_what_code_prints_and_how_it_fails():
    good = await run_python("import math\nfor i in range(3): print(math.factorial(i + 3))")
    assert (good.output, good.ok) == ("6\n24\n120", True)
    bad = await run_python("x = 1\nprint('before')\nx / 0")
    assert not bad.ok and "ZeroDivisionError" in bad.output and "before" in bad.output
    assert 'File "<code>", line 3' in bad.output and "guard" not in bad.output
    syntax = await run_python("for for")
    assert not syntax.ok and "SyntaxError" in syntax.output


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.system('touch {target}')",
        "import subprocess; subprocess.run(['touch', '{target}'])",
        "open('{target}', 'w').write('x')",
        "import os; os.open('{target}', os.O_CREAT | os.O_WRONLY)",
        "import pathlib; pathlib.Path('{target}').touch()",
        "print(open('/etc/passwd').read())",
        "print(open('{secret}').read())",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import ctypes; ctypes.CDLL(None).system(b'touch {target}')",
        "import os; os.fork()",
        "import os; os.kill(os.getppid(), 9)",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getpid()), 0)",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "import os; os.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))",
        "import os; os.mkfifo('{target}')",
        "import os; os.chroot('.')",
        "import importlib.machinery as m, importlib.util as u\n"
        "path = u.find_spec('resource').origin\n"
        "loader = m.ExtensionFileLoader('x.resource', path)\n"
        "spec = m.ModuleSpec('x.resource', loader, origin=path)\n"
        "u.module_from_spec(spec).prlimit(0, 7, (32, 32))",
        "import os; os.remove('{secret}')",
        "import os; print(os.listdir('/root'))",
        "import posix; posix.system('touch {target}')",
        "import os; os.execv('/bin/touch', ['touch', '{target}'])",
        'import ctypes; ctypes.pythonapi.PyRun_SimpleString(b\'open("{target}", "w")\')',
        "import _imp, importlib.machinery as m\n"
        "s = m.ModuleSpec('_posixsubprocess', m.BuiltinImporter)\n"
        "p = _imp.create_builtin(s)\nimport os\n"
        "p.fork_exec([b'touch', b'{target}'], [b'/bin/touch'], True, (), None, None, -1, -1, -1,"
        " -1, -1, -1, -1, -1, False, False, -1, None, None, None, -1, None, True)\n"
        "import time; time.sleep(0.3); assert os.path.exists('{target}')",
        "import os; os.symlink('{secret}', 'link'); print(open('link').read())",
    ],
)
async def test_code_can_not_reach_out(code, tmp_path):
    target, secret = tmp_path / "made", tmp_path / "secret"
    secret.write_text("the secret")
    result = await run_python(code.format(target=target, secret=secret))
    assert not result.ok
    assert "secret\n" not in result.output and "the secret" not in result.output
    assert not target.exists() and secret.exists()


async def test_code_begins_no_process_that_could_outlive_it():
    code = (
        "import os, _posixsubprocess as p\n"
        "read, write = os.pipe()\n"
        "def begun():\n    print('in a child', flush=True)\n    os._exit(0)\n"
        "p.fork_exec([b'true'], [b'/bin/true'], True, (write,), None, None, -1, -1, -1,"
        " -1, -1, -1, read, write, False, True, -1, None, None, None, -1, begun, False)"
    )
    result = await run_python(code)
    assert "in a child" not in result.output and "Error" in result.output and not result.ok
    threads = "import threading\nt = threading.Thread(target=print, args=['beside'])\nt.start()"
    assert os.geteuid() or (await run_python(threads)).output == "beside"  # root's are not counted


async def test_code_that_hangs_grows_or_babbles_is_ended():
    async with asyncio.timeout(60):
        loop, sleep, memory, output, _ = await asyncio.gather(
            run_python("while True: pass", 1.0),
            run_python("import time; time.sleep(1000)", 1.0),
            run_python("x = bytearray(2**31)", 60),
            run_python("while True: print('x' * 1000)", 60),
            run_python(
                "import threading\nfor i in range(9): threading.Thread(target=print).start()"
            ),
        )
    assert "Not done after 1 s" in loop.output and "Not done after 1 s" in sleep.output
    assert "MemoryError" in memory.output
    assert output.output.endswith("[output cut]") and len(output.output) < 30_000
    assert not any(r.ok for r in (loop, sleep, memory, output))


async def test_the_time_until_python_runs_is_not_the_codes(monkeypatch):
    late = "import time; time.sleep({})\n" + sandbox._CHILD
    monkeypatch.setattr(sandbox, "_CHILD", late.replace("{}", "11", 1))
    found = await run_python("print(6 * 7)", 10.0)
    assert (found.output, found.ok) == ("42", True)
    monkeypatch.setattr(sandbox, "_CHILD", late.replace("{}", "1000", 1))
    monkeypatch.setattr(sandbox, "_START_TIMEOUT_S", 0.5)
    assert "Python did not start in 0.5 s" in (await run_python("print(6 * 7)", 60)).output


async def test_a_python_that_does_not_start_shows_why(monkeypatch):
    monkeypatch.setattr(sandbox, "_CHILD", "import no_such_module")
    found = await run_python("print(6 * 7)")
    assert not found.ok and "no_such_module" in found.output and "Traceback" in found.output


async def test_the_code_sees_no_environment_and_leaves_no_files(monkeypatch):
    monkeypatch.setenv("TRINITY_TEST_KEY", "k-123")
    code = "import os; print(dict(os.environ)); open('f', 'w').write('x'); print(os.getcwd())"
    result = await run_python(code, 60)
    assert result.ok and "k-123" not in result.output
    folder = Path(result.output.splitlines()[-1])
    assert folder.name.startswith("trinity_code_") and not folder.exists()
