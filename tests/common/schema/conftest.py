from tests.buffer.conftest import database, postgres  # noqa: F401
