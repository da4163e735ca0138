from tests.buffer.conftest import database, mariadb, postgres, postgres_url  # noqa: F401
