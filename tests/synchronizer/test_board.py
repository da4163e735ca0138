import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from trinity.checkpoint.atomic import write_text
from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.board import Board, VersionBoard
from trinity.synchronizer.file_board import FileBoard
from trinity.synchronizer.schedule import TrainerRhythm


def ticket(version: int) -> WeightTicket:
    return WeightTicket(version, "checkpoint", f"digest of {version}", f"/weights_{version}")


@pytest.fixture(params=["memory", "files"])
def board(request: pytest.FixtureRequest, tmp_path: Path) -> Board:
    return VersionBoard() if request.param == "memory" else FileBoard(tmp_path / "board")


async def started(call: asyncio.Task) -> asyncio.Task:
    """``call`` once it waits."""
    await asyncio.sleep(0.05)
    assert not call.done()
    return call


def task(coroutine) -> asyncio.Task:
    return asyncio.get_running_loop().create_task(coroutine)


async def test_at_first_nothing_is_out(board: Board) -> None:
    assert await board.newest() == (0, None)
    assert await board.is_open() and not await board.is_asked()


async def test_the_newest_comes_at_once(board: Board) -> None:
    await board.publish(ticket(1))
    await board.publish(ticket(4))
    assert await board.wait_newer(0, 60) == ticket(4)
    assert await board.wait_newer(3, 60) == ticket(4)
    assert await board.newest() == (4, ticket(4))


@pytest.mark.parametrize("version", [1, 2])
async def test_versions_only_grow(board: Board, version: int) -> None:
    await board.publish(ticket(2))
    with pytest.raises(ValueError, match=f"Version {version} is not above 2"):
        await board.publish(ticket(version))
    assert await board.newest() == (2, ticket(2))


async def test_all_who_wait_are_told(board: Board) -> None:
    waiting = [await started(task(board.wait_newer(than, 60))) for than in (0, 0, 1)]
    await board.publish(ticket(1))
    assert await waiting[0] == await waiting[1] == ticket(1)
    await started(waiting[2])
    await board.publish(ticket(2))
    assert await waiting[2] == ticket(2)


async def test_a_wait_in_vain_says_for_what(board: Board) -> None:
    await board.publish(ticket(3))
    with pytest.raises(TimeoutError, match=r"newer than version 3 .*newest is version 3"):
        await board.wait_newer(3, 0.1)


async def test_weights_that_nobody_sent_are_not_called_published() -> None:
    with pytest.raises(TimeoutError, match=r"version 0, with which the run began \d+ s ago"):
        await VersionBoard().wait_newer(0, 0.01)


async def test_the_end_is_told_to_who_waits(board: Board) -> None:
    waiting = await started(task(board.wait_newer(0, 60)))
    await board.close("done")
    assert await waiting is None
    assert await board.wait_newer(0, 60) is None
    assert not await board.is_open()


async def test_the_last_weights_count_after_the_end(board: Board) -> None:
    await board.publish(ticket(1))
    await board.close("done")
    assert await board.wait_newer(0, 60) == ticket(1)
    assert await board.wait_newer(1, 60) is None


@pytest.mark.parametrize(("resumed_at", "kept"), [(0, 0), (3, 0), (5, 5), (6, 5)])
async def test_weights_newer_than_the_trainer_are_taken_back(
    board: Board, resumed_at: int, kept: int
) -> None:
    """It was killed at step 5, and goes on from a checkpoint before it."""
    await board.publish(ticket(5))
    waiting = await started(task(board.wait_newer(5, 60)))
    assert await board.reopen(resumed_at) == (kept == 0)
    assert await board.newest() == (kept, ticket(kept) if kept else None)
    for version in range(resumed_at + 1, 8):
        await board.publish(ticket(version))
    assert (await waiting).version > 5


async def test_a_trainer_may_start_again(board: Board) -> None:
    await board.close("done")
    await board.reopen(0)
    assert await board.is_open()
    waiting = await started(task(board.wait_newer(0, 60)))
    await board.publish(ticket(1))
    assert await waiting == ticket(1)


async def test_the_end_of_an_earlier_trainer_is_none_to_who_joins(tmp_path: Path) -> None:
    await FileBoard(tmp_path).close("done")
    board = FileBoard(tmp_path)
    assert not await board.is_open()
    await board.join()
    assert await board.is_open() and await board.is_over()
    waiting = await started(task(board.wait_newer(0, 60)))
    await FileBoard(tmp_path).close("done")  # with the same words
    assert await asyncio.wait_for(waiting, 60) is None


async def test_a_trainer_tells_its_rhythm_when_it_starts(tmp_path: Path) -> None:
    board, trainer = FileBoard(tmp_path), FileBoard(tmp_path, TrainerRhythm(8, 2))
    waiting = await started(task(board.trainer_rhythm(60)))
    await trainer.reopen(0)
    assert await asyncio.wait_for(waiting, 60) == TrainerRhythm(8, 2)
    await trainer.close("done")
    assert await board.trainer_rhythm(60) is None
    await board.join()  # the next trainer may have another
    with pytest.raises(TimeoutError, match=r"Waited 0 s for a trainer to start.*same job"):
        await board.trainer_rhythm(0.1)


async def test_asking_is_answered_by_new_weights(board: Board) -> None:
    asking = await started(task(board.ask(0, 60)))
    await asyncio.wait_for(board.wait_asked(), 60)
    assert await board.is_asked()
    await board.publish(ticket(1))
    assert await asking == ticket(1)
    assert not await board.is_asked()


async def test_asking_may_be_declined(board: Board) -> None:
    await board.publish(ticket(1))
    asking = await started(task(board.ask(1, 60)))
    await board.decline()
    assert await asking is None
    assert not await board.is_asked()
    again = await started(task(board.ask(1, 60)))  # an old answer is none to a new question
    await board.close("done")
    assert await again is None


async def test_an_unanswered_question_says_so(board: Board) -> None:
    with pytest.raises(TimeoutError, match="newer than version 0 and had no answer"):
        await board.ask(0, 0.1)


async def test_a_cancelled_wait_leaves_the_board_usable(board: Board) -> None:
    for wait in (board.wait_newer(0, 60), board.ask(0, 60), board.wait_asked()):
        waiting = task(wait)
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await board.decline()
    await board.publish(ticket(1))
    assert await board.wait_newer(0, 60) == ticket(1)


async def test_a_resumed_board_goes_on_from_its_version() -> None:
    board = VersionBoard(version=7)
    assert await board.newest() == (7, None)
    with pytest.raises(ValueError):
        await board.publish(ticket(7))
    await board.publish(ticket(8))
    assert await board.wait_newer(7, 60) == ticket(8)


async def test_files_tell_another_process(tmp_path: Path) -> None:
    make: Callable[[], FileBoard] = lambda: FileBoard(tmp_path)  # noqa: E731
    await make().publish(ticket(1))
    assert await make().newest() == (1, ticket(1))
    asking = await started(task(make().ask(1, 60)))
    assert await make().is_asked()
    await make().publish(ticket(2))
    assert await asking == ticket(2)
    await make().close("done")
    assert not await make().is_open()


async def test_a_question_outlives_a_restart_of_the_trainer(board: Board) -> None:
    asking = task(board.ask(0, 60))
    await asyncio.wait_for(board.wait_asked(), 60)
    await board.reopen(0)  # it was killed, and starts again
    assert await board.is_asked()
    await board.publish(ticket(1))
    assert await asyncio.wait_for(asking, 60) == ticket(1)


async def test_an_answer_outlives_a_restart_of_the_trainer(tmp_path: Path) -> None:
    board, trainer = FileBoard(tmp_path), FileBoard(tmp_path)
    asking = task(board.ask(0, 60))
    await asyncio.wait_for(trainer.wait_asked(), 60)
    await trainer.publish(ticket(1))
    await trainer.reopen(1)  # killed before the explorer has looked
    assert await asyncio.wait_for(asking, 60) == ticket(1)


async def test_weights_that_are_taken_back_while_one_looks_are_none(tmp_path: Path) -> None:
    board, ended = FileBoard(tmp_path), threading.Event()
    text = json.dumps(asdict(ticket(1)))

    def come_and_go() -> None:
        while not ended.is_set():
            write_text(tmp_path / "newest.json", text)
            (tmp_path / "newest.json").unlink()

    writer = threading.Thread(target=come_and_go)
    writer.start()
    try:
        found = {(await board.newest())[0] for _ in range(20_000)}
    finally:
        ended.set()
        writer.join()
    assert found <= {0, 1}
