import sqlite3

import pytest

from tests.workflows.agent_fakes import AgentModel
from tests.workflows.test_built_in import run
from trinity.common.errors import NotSetUpError
from trinity.common.models.fake import FakeModel
from trinity.common.workflows import Task
from trinity.workflows.envs.text_game import TextGameWorkflow


class Door:
    """Open the door with the key."""

    def reset(self):
        self.has_key = False
        return "There is a key and a door."

    def step(self, command):
        if command == "take key":
            self.has_key = True
            return "You have the key.", 0.5, False
        is_open = self.has_key and command == "open door"
        return ("It opens.", 1.0, True) if is_open else ("It is locked.", 0.5 * self.has_key, False)

    def close(self):
        pass


class DoorWorkflow(TextGameWorkflow):
    rules = "Leave."

    def open_game(self):
        return Door()


SOLVED = ["<action>take key</action>", "hm", "now <action>open door</action>"]


@pytest.mark.parametrize("step_wise", [False, True])
async def test_a_world_of_text(step_wise):
    arguments = {"step_wise": step_wise}
    rows, _ = await run(DoorWorkflow, SOLVED, repeat_times=1, workflow_args=arguments)
    assert len(rows) == (3 if step_wise else 1)
    assert all(r.reward == 1 and r.metrics["won"] == 1 for r in rows)
    assert rows[0].metrics["missing_actions"] == 1 and rows[0].metrics["env_steps"] == 3


@pytest.mark.parametrize("key", ["max_turns", "max_env_steps"])
async def test_a_world_ends_after_so_many_turns(key):
    [row], _ = await run(DoorWorkflow, ["hm"] * 9, repeat_times=1, workflow_args={key: 2})
    assert row.metrics["env_steps"] == 2


async def test_a_second_try_after_a_reflection():
    model = FakeModel(["<action>open door</action>"] * 2 + ["I need the key."] + SOLVED, version=2)
    arguments = {"reflect": True, "max_env_steps": 2}
    [row], _ = await run(
        DoorWorkflow, [], model=model, repeat_times=1, workflow_args=arguments | {"max_turns": 3}
    )
    assert "I need the key." in row.prompt_text and row.reward == 0.5


async def test_a_first_try_too_long_to_be_thought_of_is_all_there_is():
    model = FakeModel(["hm"] * 9, version=2)
    asked = model.chat_async

    async def chat_async(messages, **sampling):
        [reply] = await asked(messages, **sampling)
        if "You did not reach" in messages[-1]["content"]:
            reply.truncate_status = "prompt_truncated"
        return [reply]

    model.chat_async = chat_async
    task = Task(workflow=DoorWorkflow, workflow_args={"reflect": True, "max_env_steps": 2})
    [row] = await task.to_workflow(model).run_async()
    assert (
        row.metrics["env_steps"] == 2 and "noted" not in row.prompt_text and len(model.calls) == 3
    )


@pytest.mark.parametrize(
    ("name", "row", "hint"),
    [
        ("alfworld_workflow", {"game_file": "x/game.tw-pddl"}, "alfworld-download"),
        ("step_wise_alfworld_workflow", {"game_file": "x"}, "alfworld-download"),
        ("RAFT_reflect_alfworld_workflow", {"game_file": "x"}, "alfworld-download"),
        ("sciworld_workflow", {"task_name": "boil"}, "pip install scienceworld"),
        ("webshop_workflow", {"session": 1}, "setup.sh"),
    ],
)
async def test_worlds_that_are_not_there_say_how_to_get_them(name, row, hint):
    workflow = Task(workflow=name, raw_task=row).to_workflow(FakeModel(["x"]))
    with pytest.raises(NotSetUpError, match=hint):
        await workflow.run_async()


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table goods (name text, price int)")
        connection.executemany("insert into goods values (?, ?)", [("tea", 3), ("cake", 5)])
    return path


async def test_a_folder_of_databases_that_is_not_there_ends_the_job_a_single_one_does_not(tmp_path):
    async def begin(folder):
        row = {"prompt": "q", "response": "select 1", "database": "absent.db"}
        arguments = {"database_dir": str(folder)}
        task = Task(workflow="intercode_sql_workflow", raw_task=row, workflow_args=arguments)
        return await task.to_workflow(FakeModel(["x"])).run_async()

    with pytest.raises(NotSetUpError, match=r"no folder .*nowhere.*workflow_args\.database_dir"):
        await begin(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no database .*absent\.db"):
        await begin(tmp_path)


async def test_a_game_of_alfworld_that_is_not_there_is_the_fault_of_its_row(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    row = {"game_file": "x/game.tw-pddl"}
    task = Task(workflow="alfworld_workflow", raw_task=row)
    with pytest.raises(ValueError, match="no game"):
        await task.to_workflow(FakeModel(["x"])).run_async()


async def test_sql(database):
    row = {"prompt": "What is cheap?", "response": "select name from goods where price < 4"}
    row["database"] = database.name
    replies = [
        "```sql\nselect * from goodies\n```",
        "```sql\ndelete from goods\n```",
        "```sql\nwith recursive c(x) as (select 1 union all select x + 1 from c)\n"
        "select count(*) from c\n```",
        "```sql\nSELECT name FROM goods WHERE price <= 3\n```",
        "SUBMIT",
    ]
    arguments = {"database_dir": str(database.parent)}
    [row], _ = await run(
        "intercode_sql_workflow", replies, row, repeat_times=1, workflow_args=arguments
    )
    assert row.reward == 1 and row.metrics["query_errors"] == 3
    assert "no such table" in row.response_text and "('tea',)" in row.response_text
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from goods").fetchone() == (2,)


async def test_mailbox(tmp_path):
    path = tmp_path / "mail.db"
    with sqlite3.connect(path) as connection:
        columns = "message_id, date, from_address, to_address, subject, body"
        connection.execute(f"create table emails ({columns})")
        mails = [
            ("m1", "2001-02-03", "ann@x.com", "bob@x.com", "Lunch", "At noon in the Red Lion."),
            ("m2", "2001-02-04", "eve@x.com", "al@x.com", "Lunch", "Somewhere else."),
        ]
        connection.executemany("insert into emails values (?, ?, ?, ?, ?, ?)", mails)
    calls = [
        [("search_emails", {"keywords": ["lunch"]})],
        [("read_email", {"message_id": "m1"}), ("read_email", {"message_id": "' or 1=1 --"})],
        "Red Lion",
    ]
    model = AgentModel(calls, version=2)
    row = {"prompt": "Where is lunch?", "response": "Red Lion", "inbox": "bob@x.com"}
    [reply], _ = await run(
        "email_search_workflow",
        [],
        row,
        model=model,
        repeat_times=1,
        workflow_args={"database": str(path)},
    )
    assert reply.reward == 1
    found = [m["content"] for m in model.requests[2]["messages"] if m["role"] == "tool"]
    assert "m1" in found[0] and "m2" not in found[0]
    assert "Red Lion" in found[1] and "no mail" in found[2]


@pytest.mark.parametrize(
    ("workflow", "given", "turns"),
    [
        ("react_workflow", {}, 8),
        ("email_search_workflow", {}, 10),
        ("agentscope_v1_react_search_workflow", {}, 10),
        ("email_search_workflow", {"max_turns": 4}, 4),
    ],
)
async def test_agents_that_never_answer_end_after_their_turns(
    workflow, given, turns, tmp_path, monkeypatch
):
    monkeypatch.setenv("SEARXNG_BASE_URL", "http://127.0.0.1:9")
    database = tmp_path / "mail.db"
    database.touch()
    model = AgentModel([[("nothing", {})]] * 20, version=2)
    arguments = {"database": str(database), **given}
    task = Task(workflow=workflow, raw_task={"prompt": "q", "response": "a"})
    task.workflow_args = arguments
    [row] = await task.to_workflow(model).run_async()
    assert row.metrics["turns"] == turns


async def test_search_needs_its_service(monkeypatch):
    monkeypatch.delenv("SEARXNG_BASE_URL", raising=False)
    task = Task(workflow="agentscope_v1_react_search_workflow", raw_task={"prompt": "q"})
    with pytest.raises(NotSetUpError, match="SEARXNG_BASE_URL"):
        await task.to_workflow(AgentModel(["x"])).run_async()


async def test_games_of_textarena():
    pytest.importorskip("textarena")
    guesses = [f"I say [{number}]" for number in range(1, 21)]
    row = {"env_id": "GuessTheNumber-v0", "seed": 3}
    [won], _ = await run("textarena_workflow", guesses, row, repeat_times=1)
    again, _ = await run("textarena_workflow", guesses, row, repeat_times=1)
    assert won.reward == 1 and again[0].metrics["game_turns"] == won.metrics["game_turns"]
    row = {"env_id": "TicTacToe-v0", "num_players": 2}
    [won], _ = await run(
        "textarena_workflow",
        ["[0]", "[4]", "[8]"],
        row,
        repeat_times=1,
        judge=["[1]", "[2]"],
    )
    assert won.reward == 1 and won.metrics["env_steps"] == 3
    sampled = won.tokens[won.prompt_length :][won.action_mask]
    assert bytes(sampled.tolist()).decode() == "[0]\n[4]\n[8]\n"
