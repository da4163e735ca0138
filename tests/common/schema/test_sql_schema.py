import asyncio
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.buffer.samples import experience, group
from trinity.buffer import get_buffer_writer, make_storage
from trinity.common.config.buffer import ExperienceBufferConfig
from trinity.common.schema.database import Database, DatabaseProblem
from trinity.utils.words import without_password

# As printed in the FAQ ("What's the purpose of buffer.trainer_input.experience_buffer.path?")
FAQ_SCRIPT = """
from sqlalchemy import create_engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool
from trinity.common.schema.sql_schema import ExperienceModel

engine = create_engine(buffer.trainer_input.experience_buffer.path)
session = sessionmaker(bind=engine)
sess = session()

MAX_EXPERIENCES = 4
experiences = (
    sess.query(ExperienceModel)
    .limit(MAX_EXPERIENCES)
    .all()
)

exp_list = []
for exp in experiences:
    exp_list.append(ExperienceModel.to_experience(exp))

# Print the experiences
for exp in exp_list:
    print(f"{exp.prompt_text=}", f"{exp.response_text=}")
"""


def write(path: str, kind: str, name: str, count: int) -> None:
    async def run() -> None:
        config = ExperienceBufferConfig(name=name, storage_type=kind, path=path)
        storage = make_storage(config)
        await storage.prepare()
        writer = get_buffer_writer(config, storage)
        await writer.acquire()
        await writer.write(group(count))
        await writer.release()
        await storage.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["queue", "sql"])
def test_the_script_of_the_faq_runs_as_printed(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = f"sqlite:///{tmp_path}/gsm8k.db"
    write(path, kind, "gsm8k_buffer", 6)
    section = SimpleNamespace(
        trainer_input=SimpleNamespace(experience_buffer=SimpleNamespace(path=path))
    )
    exec(compile(textwrap.dedent(FAQ_SCRIPT), "faq", "exec"), {"buffer": section})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "exp.prompt_text='question' exp.response_text='answer 0'"
    assert len(lines) == 4


def test_one_query_covers_all_buffers_of_a_database(database: str):
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    from trinity.common.schema.database import database_url
    from trinity.common.schema.sql_schema import ExperienceModel

    write(database, "sql", "first", 2)
    write(database, "queue", "second", 3)
    with Session(create_engine(database_url(database))) as session:
        rows = session.query(ExperienceModel).order_by("buffer", "id").all()
        assert [row.buffer for row in rows] == ["first"] * 2 + ["second"] * 3
        found = rows[0].to_experience()
        assert found.eid.tid == experience(0).eid.tid
        assert rows[0].to_experience(rows[1].experience_bytes).response_text == "answer 1"


def test_no_message_has_the_password_of_a_database():
    path = "postgresql://me:s3cr@et@127.0.0.1:1/rows"
    shown = r"postgresql://me:\*\*\*@127\.0\.0\.1:1/rows"
    with pytest.raises(DatabaseProblem, match=shown) as told:
        Database(path, max_retry_times=0).open()
    assert "cr@et" not in str(told.value)
    assert without_password("/data/a@b.db") == "/data/a@b.db"
    assert without_password("postgresql://me@host/rows") == "postgresql://me@host/rows"
