"""Runs Python code that a model wrote, in a process that can do little and is killed on time.

The child has limits on memory, processor time, processes and file size, an empty environment and
a folder of its own that is deleted. A filter in the kernel (Linux on x86-64 and arm64) refuses
sockets, further processes, other programs, signals, and what changes other processes; an audit hook
refuses those too, and foreign files. For code of a person who means harm, run the whole job in a
container all the same.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import tempfile
from dataclasses import dataclass

_START_TIMEOUT_S = 60.0
_READY = b"\0"  # what the child says before the code begins
_MAX_OUTPUT = 20_000
_MAX_FILE_BYTES = 16 * 2**20
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
_MAX_PROCESSES = 0  # on top of those there are: none

_CHILD = r"""
import encodings.idna, math, cmath, fractions, decimal, itertools, functools, collections, random
import statistics, re, json, datetime, string, heapq, bisect, operator, typing, dataclasses
import linecache, os, struct, sys, traceback

def make_guard(is_closed):
    folder = os.path.realpath(os.getcwd())
    readable = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, *sys.path) if p}
    readable |= {folder, "/usr/share/zoneinfo", "/dev/null", "/dev/urandom"}
    forbidden = (
        "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn",
        "os.kill", "ctypes.", "pty.", "shutil.", "syslog.", "ftplib.", "smtplib.",
        "urllib.", "http.", "signal.pthread_kill", "cpython.run_", "os.chmod", "os.chown",
        "os.link", "os.symlink", "os.rename", "os.truncate", "os.chdir", "mmap.",
        "os.setxattr", "os.removexattr", "resource.",
        "gc.get", "sys._current_frames", "sys.settrace", "sys.setprofile",
    )
    modules = {"pty", "resource"} | (set() if is_closed else {"_posixsubprocess"})
    realpath, fsdecode = os.path.realpath, os.fsdecode
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    state = [False]

    def inside(path, roots):
        if path is None or isinstance(path, int):
            return path is None or path > 2
        path = realpath(fsdecode(path))
        return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)

    def is_allowed(event, args):
        if event == "open":
            writes = isinstance(args[2], int) and args[2] & writing
            return inside(args[0], (folder,) if writes else readable)
        if event == "import":
            return args[0].partition(".")[0] not in modules
        if event in ("os.remove", "os.mkdir", "os.rmdir"):
            return inside(args[0], (folder,))
        if event in ("os.listdir", "os.scandir"):
            return inside(args[0], readable)
        return not event.startswith(forbidden)

    def guard(event, args):
        if state[0]:
            return
        state[0] = True
        try:
            allowed = is_allowed(event, args)
        finally:
            state[0] = False
        if not allowed:
            error = ImportError if event == "import" else PermissionError
            raise error(f"{event} {args[0] if event == 'import' else ''} is not allowed here")

    return guard

def close_system_calls():
    import ctypes
    both = (424, 434, 438)  # pidfd_send_signal, pidfd_open, pidfd_getfd
    # socket, socketpair, (fork, vfork,) execve, execveat; kill, tkill, rt_sigqueueinfo, ptrace,
    # process_vm_readv, process_vm_writev; setpriority, sched_setparam, sched_setscheduler,
    # sched_setaffinity; (mknod,) mknodat, chroot, mount, umount2, pivot_root, unshare, setns,
    # reboot
    arch, clone, numbers = {
        "x86_64": (0xC000003E, 56, (
            *both, 41, 53, 57, 58, 59, 322, 62, 200, 129, 101, 310, 311, 141, 142, 144, 203,
            133, 259, 161, 165, 166, 155, 272, 308, 169,
        )),
        "aarch64": (0xC00000B7, 220, (
            *both, 198, 199, 221, 281, 129, 130, 138, 117, 270, 271, 140, 118, 119, 122,
            33, 51, 40, 39, 41, 97, 268, 142,
        )),
    }.get(os.uname().machine, (0, 0, ()))
    clone3, clone_thread = 435, 0x10000
    denied, absent, allowed = 0x00050001, 0x00050026, 0x7FFF0000  # EPERM; ENOSYS; go on
    steps = [(0x20, 0, 0, 4), (0x15, 0, len(numbers) + 5, arch), (0x20, 0, 0, 0)]
    steps += [(0x15, len(numbers) + 4 - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(0x15, 5, 0, clone3), (0x15, 0, 2, clone)]  # clone3 hides its flags: then clone comes
    steps += [(0x20, 0, 0, 16), (0x45, 0, 1, clone_thread)]  # threads may begin, processes may not
    steps += [(0x06, 0, 0, allowed), (0x06, 0, 0, denied), (0x06, 0, 0, absent)]
    program = b"".join(struct.pack("HBBI", *step) for step in steps)

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]

    # it stays imported (NumPy and SymPy want it), but can open no library and find no function
    libc = ctypes.CDLL(None)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges
    filtered = libc.prctl(22, 2, ctypes.byref(Program(len(steps), program)), 0, 0) == 0
    return filtered and bool(numbers)

def run():
    source = sys.stdin.read()
    linecache.cache["<code>"] = (len(source), None, source.splitlines(True), "<code>")
    sys.addaudithook(make_guard(close_system_calls()))
    os.write(1, b"\0")
    try:
        exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<code>"]
        sys.stdout.flush()
        lines = traceback.format_list(frames) + traceback.format_exception_only(error)
        sys.stderr.write("Traceback:\n" + "".join(lines))
        sys.stderr.flush()
        os._exit(1)

run()
"""


@dataclass(frozen=True)
class CodeResult:
    """What a piece of code printed, and whether it ended well."""

    output: str
    ok: bool


async def run_python(code: str, timeout_s: float = 5.0, memory_mb: int = 1024) -> CodeResult:
    """Run ``code``; what it printed, or the error it ended with. Never raises for what it does.

    ``timeout_s`` counts from when Python runs, which takes its time on a busy machine.
    """
    with tempfile.TemporaryDirectory(prefix="trinity_code_") as folder:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-B",
            "-c",
            _CHILD,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=lambda: _limit(timeout_s, memory_mb),
        )
        late = f"Python did not start in {_START_TIMEOUT_S:g} s."
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                first = await _begin(process, code)
            late = f"Not done after {timeout_s:g} s."
            async with asyncio.timeout(timeout_s):
                output = first + await _rest(process)
        except TimeoutError:
            return CodeResult(late, ok=False)
        finally:
            _kill_group(process)
            transport = process._transport  # type: ignore[attr-defined]  # there is no public way
            transport.get_pipe_transport(1).close()  # to wait with output unread may never end
            await process.wait()
            transport.close()  # else it warns when collected
    return _result(output, process.returncode)


async def _begin(process: asyncio.subprocess.Process, code: str) -> bytes:
    """Send the code and wait until it runs; what a child said that did not get so far."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(code.encode())
        await process.stdin.drain()
    process.stdin.close()
    first = await process.stdout.read(1)
    return b"" if first == _READY else first


async def _rest(process: asyncio.subprocess.Process) -> bytes:
    """Read up to the limit; whoever prints more is cut off."""
    assert process.stdout is not None
    parts: list[bytes] = []
    size = 0
    while part := await process.stdout.read(65536):
        parts.append(part)
        size += len(part)
        if size > _MAX_OUTPUT:
            break
    else:
        await process.wait()
    return b"".join(parts)


def _result(output: bytes, code: int | None) -> CodeResult:
    text = output[:_MAX_OUTPUT].decode(errors="replace")
    if len(output) > _MAX_OUTPUT:
        return CodeResult(text + "\n[output cut]", ok=False)
    if code is not None and code < 0:
        text += f"\n[ended by signal {-code}]"
    return CodeResult(text.strip("\n"), ok=code == 0)


def _limit(timeout_s: float, memory_mb: int) -> None:
    """In the child, before it becomes Python."""
    seconds = int(timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
