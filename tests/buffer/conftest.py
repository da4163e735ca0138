"""Databases and experiences for the buffer's tests."""

import contextlib
import glob
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from sqlalchemy import text

from tests.ports import free_port
from trinity.common.schema.database import Database

Server = TypeVar("Server", "PostgresServer", "MariaServer")

URL_ENV = "TRINITY_TEST_POSTGRES_URL"  # a server that runs already, as in .ci/run
_WAIT = ("-w", "-t", "600")  # for its start or end


class PostgresServer:
    """A PostgreSQL server of our own in a temporary folder, listening on loopback only."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self._data = folder / "data"
        self._user = _unprivileged_user()
        self._port = free_port()
        if self._user is not None:
            os.chown(folder, self._user, -1)
        self._call("initdb", "-D", self._data, "-U", "trinity", "-A", "trust", "--no-sync")

    @property
    def url(self) -> str:
        return f"postgresql://trinity@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        options = f"-p {self._port} -h 127.0.0.1 -k {self._data} -F -c shared_buffers=32MB"
        log = self._data / "server.log"
        self._call("pg_ctl", "-D", self._data, "-l", log, *_WAIT, "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._call("pg_ctl", "-D", self._data, "-m", mode, *_WAIT, "stop")

    def _call(self, program: str, *arguments: object) -> None:
        command = [str(self._binaries / program), *map(str, arguments)]
        subprocess.run(
            command, check=True, user=self._user, stdout=subprocess.DEVNULL, cwd=self._data.parent
        )


def _unprivileged_user() -> int | None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_uid
        except KeyError:
            continue
    pytest.skip("root, and no other user to run PostgreSQL as")


def _binaries() -> Path | None:
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    installed = sorted(glob.glob("/usr/lib/postgresql/*/bin/initdb"))
    return Path(installed[-1]).parent if installed else None


@contextlib.contextmanager
def _running(make: Callable[[Path], Server], name: str) -> Iterator[Server]:
    """A server in a folder of its own, both gone at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"trinity_{name}_"))
    server = make(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    pytest.importorskip("psycopg")
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with _running(partial(PostgresServer, binaries), "postgres") as server:
        yield server


@pytest.fixture(scope="session")
def postgres_url(request: pytest.FixtureRequest) -> str:
    """Address of a server: the one that is named, else one of our own."""
    named = os.environ.get(URL_ENV, "").replace("+psycopg", "")
    return named or request.getfixturevalue("postgres").url


class MariaServer:
    """A MariaDB server of our own in a temporary folder, listening on loopback only."""

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        as_root = ["--user=root"] * (os.getuid() == 0)
        self._command = [program, "--no-defaults", f"--datadir={folder}/data", *as_root]
        self._port = free_port()
        install = ["mariadb-install-db", *self._command[1:]]
        install.append("--auth-root-authentication-method=normal")
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self._port}/test"

    def start(self) -> None:
        place = [f"--port={self._port}", "--bind-address=127.0.0.1"]
        place.append(f"--socket={self._folder}/socket")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*self._command, *place], stderr=log)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            time.sleep(0.05)
        raise RuntimeError(f"MariaDB does not start: {(self._folder / 'log').read_text()}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaServer]:
    pytest.importorskip("pymysql")
    program = shutil.which("mariadbd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("MariaDB is not installed (apt-get install mariadb-server)")
    with _running(partial(MariaServer, program), "mariadb") as server:
        yield server


@pytest.fixture(params=["postgres", "mariadb"])
def server(request: pytest.FixtureRequest) -> PostgresServer | MariaServer:
    """One of each kind, to be killed."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/test.db"
    name = f"test_{uuid.uuid4().hex}"
    if request.param == "mysql":
        url = request.getfixturevalue("mariadb").url
        with Database(url) as there:
            there.run(lambda c: c.execute(text(f"CREATE DATABASE {name} CHARACTER SET latin1")))
        return f"{url.rpartition('/')[0]}/{name}"
    psycopg = pytest.importorskip("psycopg")
    url = request.getfixturevalue("postgres_url")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"{url.rpartition('/')[0]}/{name}"
