"""The update loop against hand-written collaborators: publishing, saving, stopping, resuming."""

import asyncio
import re
import threading
import time

import pytest

from tests.trainer.toy import groups
from trinity.common.constants import SyncStyle
from trinity.common.experience import Experience
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.board import VersionBoard
from trinity.synchronizer.schedule import SyncSchedule
from trinity.trainer.loss import Objective
from trinity.trainer.preparation import Preparation
from trinity.trainer.trainer import Trainer, TrainerSettings
from trinity.trainer.update import Updater
from trinity.utils import progress


class FakeEngine:
    """Notes what is asked of it; saving can be made to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.save_error: OSError | None = None

    async def prepare(self) -> None:
        self.calls.append("prepare")

    async def forward_backward(self, batch, objective, which="actor") -> dict[str, float]:
        self.calls.append(f"gradient {len(batch)}")
        return {"actor/final_loss": 1.0, "actor/ratio_max_deviation": 0.0}

    async def optim_step(self, which="actor") -> dict[str, float]:
        self.calls.append("step")
        return {"actor/grad_norm": 1.0}

    async def send_weights(self, version: int) -> WeightTicket:
        return WeightTicket(version, "memory", "", None)

    async def save(self, path: str, hf: bool = False, files=None, is_last=False) -> None:
        self.calls.append(f"save {path} hf={hf} {sorted(files)}")

    async def wait_saved(self) -> None:
        if self.save_error is not None:
            raise self.save_error

    async def load(self, path: str) -> None:
        self.calls.append(f"load {path}")

    async def health(self) -> dict[str, float]:
        return {}

    async def close(self) -> None: ...


class FakeSource:
    """``total`` batches; then the end, or a wait without end."""

    def __init__(self, total: int, is_endless: bool = False) -> None:
        self.total, self.is_endless, self.given = total, is_endless, 0
        self.batch: list[Experience] = groups(2, 2)
        self.rows: list[dict[str, object]] = []

    async def sample(self, step: int):
        if self.given == self.total:
            if self.is_endless:
                await asyncio.Event().wait()
            raise StopAsyncIteration
        self.given += 1
        return self.batch, {"sample/task_count": 2.0}, self.rows

    def state_dict(self) -> dict[str, object]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class FakeCheckpoints:
    def __init__(self) -> None:
        self.completed: list[int] = []

    def folder(self, step: int) -> str:
        return f"global_step_{step}"

    def snapshot(self) -> dict[str, str]:
        return {"trainer_meta.json": "{}"}

    def complete(self, step: int) -> None:
        self.completed.append(step)


def trainer(source: FakeSource, style: SyncStyle = SyncStyle.FIXED, **settings) -> Trainer:
    engine = FakeEngine()
    objective = Objective.from_names("ppo")
    return Trainer(
        engine=engine,
        source=source,
        preparation=Preparation(engine),
        updater=Updater(engine, objective),
        board=VersionBoard(),
        schedule=SyncSchedule(style, interval=2, trainer_interval=2),
        checkpoints=FakeCheckpoints(),
        settings=TrainerSettings(**settings),
    )


async def test_publishes_on_the_interval_and_once_more_at_the_end():
    subject = trainer(FakeSource(3))
    await subject.prepare()
    await subject.run()
    version, _ = await subject.board.newest()
    assert version == 3
    assert not await subject.board.is_open()
    assert subject.engine.calls.count("step") == 3


async def test_publishes_nothing_where_nobody_takes_weights():
    subject = trainer(FakeSource(3), publishes_weights=False)
    await subject.run()
    assert (await subject.board.newest())[0] == 0


async def test_a_run_without_a_step_saves_nothing():
    subject = trainer(FakeSource(0))
    await subject.run()
    assert not any(call.startswith("save") for call in subject.engine.calls)


@pytest.mark.parametrize("wanted", [False, True])
async def test_rows_are_shown_if_asked_for(wanted: bool):
    shown = []
    source = FakeSource(1)
    subject = trainer(source, enable_preview=wanted)
    subject.report_rows = lambda *args: shown.append(args)
    await subject.run()
    source.rows, source.total = [{"reward": 1.0}], 2
    await subject.run()
    assert shown == ([("rollout_examples", source.rows, 2)] if wanted else [])


async def test_a_step_reports_what_it_was_given_and_how_long_it_took():
    source, reports = FakeSource(3), []
    source.batch[0].truncate_status = "response_truncated"
    source.batch[1].info["finish_reason"] = "length"
    source.batch[2].info["finish_reason"] = "stop"
    subject = trainer(source)
    subject.report = lambda role, step, metrics: reports.append((role, step, metrics))
    began = time.perf_counter()
    await subject.prepare()
    await subject.run()
    elapsed = time.perf_counter() - began
    assert [(role, step) for role, step, _ in reports] == [("trainer", n) for n in (1, 2, 3)]
    assert 0 < sum(metrics["time/step"] for _, _, metrics in reports) <= elapsed
    _, _, found = reports[-1]
    assert found["sample/task_count"] == 2
    assert found["sample/experience_count"] == 4
    assert found["sample/trained_tokens"] == sum(int(e.action_mask.sum()) for e in source.batch)
    assert found["response_length/max"] == max(e.response_length for e in source.batch)
    assert found["response_length/clip_ratio"] == 0.5
    num_tokens = sum(len(e.tokens) for e in source.batch)
    assert found["perf/throughput"] * found["time/step"] == pytest.approx(num_tokens)


async def test_saves_on_the_interval_and_the_last_with_hugging_face_weights():
    subject = trainer(FakeSource(3), save_interval=2)
    await subject.run()
    saves = [call for call in subject.engine.calls if call.startswith("save")]
    assert saves == [
        "save global_step_2 hf=False ['trainer_meta.json']",
        "save global_step_3 hf=True ['trainer_meta.json']",
    ]
    assert subject.checkpoints.completed == [2, 3]


async def test_the_event_loop_goes_on_while_unread_rows_are_written_out():
    """Explorer, engines' watch and signals live by it; 2,000 rows of 4,096 tokens take 0.2 s."""
    subject = trainer(FakeSource(1))
    may_write = threading.Event()

    def write() -> bytes:
        assert may_write.wait(60), "the loop stands still"
        return b"rows"

    def snapshot() -> dict[str, object]:
        asyncio.get_running_loop().call_soon(may_write.set)
        return {"trainer_meta.json": "{}", "unread_0.trxp": write}

    subject.checkpoints.snapshot = snapshot
    await subject.run()
    assert subject.engine.calls[-1] == (
        "save global_step_1 hf=True ['trainer_meta.json', 'unread_0.trxp']"
    )


@pytest.mark.parametrize(
    ("rule", "expected"), [("always", [True, True]), ("never", [False, False])]
)
async def test_hugging_face_weights_by_rule(rule: str, expected: list[bool]):
    subject = trainer(FakeSource(2), save_interval=1, save_hf=rule)
    await subject.run()
    saves = [call for call in subject.engine.calls if call.startswith("save")]
    assert [("hf=True" in call) for call in saves][:2] == expected


async def test_samples_are_shown_at_every_sync_and_what_is_left_at_the_end():
    class Source(FakeSource):
        async def sample(self, step: int):
            experiences, metrics, _ = await super().sample(step)
            return experiences, metrics, [{"reward": float(step)}]

    shown = []
    for is_on in (True, False):
        subject = trainer(Source(3), enable_preview=is_on)
        subject.report_rows = lambda name, rows, step: shown.append((name, rows, step))
        await subject.prepare()
        await subject.run()
    assert shown == [
        ("rollout_examples", [{"reward": 1.0}, {"reward": 2.0}], 2),
        ("rollout_examples", [{"reward": 3.0}], 3),
    ]


async def test_the_first_interval_between_weights_does_not_hold_the_start():
    subject, reports = trainer(FakeSource(2)), []
    subject.report = lambda role, step, metrics: reports.append(metrics)
    subject._published_at -= 1e6  # made long before it is prepared
    await subject.prepare()
    await subject.run()
    assert reports[1]["time/trainer_sync_interval"] < 1e5


async def test_the_share_of_prompts_that_were_cut_is_told():
    source = FakeSource(1)
    source.batch[0].truncate_status = "prompt_truncated"
    reports = []
    subject = trainer(source)
    subject.report = lambda role, step, metrics: reports.append(metrics)
    await subject.prepare()
    await subject.run()
    assert reports[0]["prompt_length/clip_ratio"] == 0.25
    assert reports[0]["response_length/clip_ratio"] == 0.0


class EmptyAtFirst(FakeSource):
    """Its first batch has no token to train on."""

    async def sample(self, step: int):
        batch, *rest = await super().sample(step)
        if step > 1:
            return batch, *rest
        masked = groups(2, 2)
        for experience in masked:
            experience.action_mask[:] = False
        return masked, *rest


async def test_a_batch_without_trained_tokens_is_skipped_and_counted():
    reports = []
    subject = trainer(EmptyAtFirst(2))
    subject.report = lambda role, step, metrics: reports.append(metrics)
    await subject.run()
    assert [found.get("actor/skipped_steps") for found in reports] == [1.0, None]
    assert subject.engine.calls.count("step") == 1
    assert subject.state_dict()["trained_iterations"] == 1


async def test_a_run_that_trained_nothing_is_not_finished():
    source = FakeSource(2)
    for experience in source.batch:
        experience.action_mask[:] = False
    subject = trainer(source)
    with pytest.raises(RuntimeError, match=r"all of its 2 steps had no token .* are masked\. Mend"):
        await subject.run()
    assert await subject.board.is_over()
    assert subject.checkpoints.completed == []


async def test_nor_is_its_resume_but_that_of_one_that_trained_is(tmp_path):
    state = {"latest_iteration": 2, "sample_strategy_state": {"given": 2}}
    subject = trainer(FakeSource(2))
    subject.load_state_dict({**state, "trained_iterations": 0})
    with pytest.raises(RuntimeError, match=r"had no token to train on\. Mend"):
        await subject.run()
    subject = trainer(FakeSource(2))
    subject.load_state_dict({**state, "trained_iterations": 1})
    await subject.run()


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (None, "all tokens of its 4 experiences are masked"),
        ("prompt_truncated", "4 of its 4 prompts are longer than model.max_prompt_tokens"),
    ],
)
async def test_a_skipped_step_says_why(status, why, caplog):
    source = FakeSource(1)
    for experience in source.batch:
        experience.action_mask[:] = False
        experience.truncate_status = status
    subject = trainer(source)
    subject.logger.addHandler(caplog.handler)
    with pytest.raises(RuntimeError, match=f"its only step had no .* The last one: {why}"):
        await subject.run()
    assert f"Step 1 has no token to train on: {why}." in caplog.messages


async def test_a_wait_for_experiences_is_shown(monkeypatch):
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)
    shown: list[str] = []
    source = FakeSource(1, is_endless=True)
    subject = trainer(source)
    subject.show = lambda text, is_to_stay: shown.append(text)
    running = asyncio.create_task(subject.run())
    while len(shown) < 3:
        await asyncio.sleep(0.01)
    subject.stop()
    await running
    wait = r"step 2: waiting for experiences of an explorer \(mode explore\)   \d+ s so far"
    assert any(re.fullmatch(wait, text) for text in shown) and shown[-1] == ""


async def test_an_empty_read_counts_as_a_skipped_step():
    source = FakeSource(2)
    source.batch = []
    subject = trainer(source)
    with pytest.raises(RuntimeError, match="all of its samples failed or were left out"):
        await subject.run()
    assert (await subject.board.newest())[0] == 2


async def test_a_failed_save_ends_the_run():
    subject = trainer(FakeSource(3), save_interval=1)
    subject.engine.save_error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        await subject.run()
    assert subject.checkpoints.completed == []


async def test_a_failed_save_can_be_gone_over_but_not_the_last():
    subject = trainer(FakeSource(3), save_interval=1, on_save_error="continue")
    subject.engine.save_error = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        await subject.run()
    assert subject.engine.calls.count("step") == 3


async def test_stop_ends_a_wait_for_experiences_and_saves():
    subject = trainer(FakeSource(1, is_endless=True))
    running = asyncio.create_task(subject.run())
    while subject.step < 1:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    subject.stop()
    await asyncio.wait_for(running, 60)
    assert subject.checkpoints.completed == [1]


async def test_resume_loads_and_goes_on_after_the_step(tmp_path):
    subject = trainer(FakeSource(3))
    subject.load_state_dict({"latest_iteration": 2, "sample_strategy_state": {"given": 2}})
    await subject.prepare(tmp_path)
    await subject.run()
    assert subject.engine.calls[:2] == ["prepare", f"load {tmp_path}"]
    assert subject.step == 3
    assert subject.engine.calls.count("step") == 1


async def test_explorer_driven_answers_while_it_waits_for_experiences():
    subject = trainer(FakeSource(1, is_endless=True), SyncStyle.EXPLORER_DRIVEN)
    running = asyncio.create_task(subject.run())
    ticket = await asyncio.wait_for(subject.board.ask(0, 60), 60)
    assert ticket is not None and ticket.version == 1
    assert await asyncio.wait_for(subject.board.ask(1, 60), 60) is None
    subject.stop()
    await asyncio.wait_for(running, 60)


class SlowSaves(FakeEngine):
    """Its saves end when ``written`` is set; notes when it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def wait_saved(self) -> None:
        self.calls.append("wait")
        await self.written.wait()

    async def close(self) -> None:
        self.calls.append("close")


async def test_the_end_waits_for_a_save_under_way():
    subject = trainer(FakeSource(1, is_endless=True), save_interval=1)
    subject.engine = SlowSaves()
    running = asyncio.create_task(subject.run())
    while "wait" not in subject.engine.calls:
        await asyncio.sleep(0)
    running.cancel()  # as an error of the explorer does
    await asyncio.gather(running, return_exceptions=True)
    closing = asyncio.create_task(subject.close())
    subject.engine.written.set()
    await asyncio.wait_for(closing, 60)
    assert subject.checkpoints.completed == [1]
    assert subject.engine.calls[-1] == "close"


async def test_an_error_elsewhere_does_not_lose_the_last_save():
    subject = trainer(FakeSource(1))
    subject.engine = SlowSaves()
    running = asyncio.create_task(subject.run())
    while "wait" not in subject.engine.calls:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    closing = asyncio.create_task(subject.close())
    subject.engine.written.set()
    await asyncio.wait_for(closing, 60)
    assert subject.checkpoints.completed == [1]


async def test_a_save_that_failed_at_the_end_does_not_keep_the_engine_from_it():
    subject = trainer(FakeSource(1, is_endless=True), save_interval=1)
    subject.engine = SlowSaves()
    subject.engine.save_error = OSError(28, "No space left on device")
    subject.engine.wait_saved = FakeEngine.wait_saved.__get__(subject.engine)
    running = asyncio.create_task(subject.run())
    while not any(call.startswith("save") for call in subject.engine.calls):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(OSError, match="No space"):
        await subject.close()
    assert subject.engine.calls[-1] == "close"


@pytest.mark.parametrize("style", [SyncStyle.FIXED, SyncStyle.EXPLORER_DRIVEN])
async def test_a_run_that_is_cancelled_reads_no_more(style: SyncStyle):
    source = FakeSource(0, is_endless=True)
    subject = trainer(source, style)
    running = asyncio.create_task(subject.run())
    while subject._reading is None:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait({subject._reading}, timeout=60)
    assert subject._reading.cancelled()
