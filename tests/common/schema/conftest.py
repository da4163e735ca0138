from tests.buffer.conftest import database, postgres, postgres_url  # noqa: F401
