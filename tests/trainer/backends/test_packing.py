import torch

from tests.trainer.toy import groups
from trinity.common.experience import EID, Experience
from trinity.trainer.backends.torch.packing import pack_rows
from trinity.trainer.batch import TrainBatch


def row(tokens: list[int], prompt: int, task: int = 0, run: int = 0) -> Experience:
    return Experience(eid=EID(0, task, run), tokens=tokens, prompt_length=prompt)


def unpacked(batch: TrainBatch, packed) -> list[list[int]]:
    """The tokens that each segment's last token sees, itself included."""
    found = []
    for segment in packed.segments:
        path = [packed.token_ids[s.offset : s.offset + len(s.tokens)] for s in segment.path()]
        found.append(torch.cat(path).tolist())
    return found


def test_a_prompt_stands_once_for_all_samples_of_its_group():
    prompt = list(range(10, 40))
    batch = TrainBatch.from_experiences(
        [row([*prompt, 1, 2, 3], 30), row([*prompt, 4, 5], 30), row([*prompt, 4, 5], 30, task=1)]
    )
    packed = pack_rows(batch)
    assert packed.token_ids.tolist() == [*prompt, 1, 2, 4, *prompt, 4]
    assert packed.position_ids.tolist() == [*range(30), 30, 31, 30, *range(30), 30]
    assert packed.source.tolist() == [29, 30, 31, 29, 32, 62, 63]
    assert packed.trained.target.tolist() == [1, 2, 3, 4, 5, 4, 5]


def test_later_turns_share_the_earlier_ones():
    start = list(range(10, 40))
    longer = [*start, *range(50, 80)]
    batch = TrainBatch.from_experiences(
        [
            row([*start, 50, 51], 30),
            row([*longer, 3, 4], 60, run=1),
            row([*longer, 5, 6], 60, run=2),
        ]
    )
    packed = pack_rows(batch)
    seen = unpacked(batch, packed)
    assert len(packed.token_ids) < 70
    assert seen[-1][:60] == longer
    for b in range(3):
        mine = packed.trained.row == b
        for source, target in zip(packed.source[mine], packed.trained.target[mine], strict=True):
            owner = max(
                (s for s in packed.segments if s.offset <= int(source)), key=lambda s: s.offset
            )
            place = int(packed.position_ids[source])
            tokens = torch.cat([torch.from_numpy(p.tokens) for p in owner.path()])
            assert tokens[: place + 1].tolist() == batch.row_tokens()[b][: place + 1].tolist()
            assert int(batch.row_tokens()[b][place + 1]) == int(target)


def test_every_token_is_packed_once_without_sharing():
    batch = TrainBatch.from_experiences(groups())
    packed = pack_rows(batch, shares_prefixes=False)
    assert len(packed.token_ids) == batch.num_tokens - len(batch)
    assert len(packed.segments) == len(batch)


def test_rows_without_trained_tokens_are_left_out():
    rows = groups(1, 3)
    rows[1].action_mask[:] = False
    packed = pack_rows(TrainBatch.from_experiences(rows))
    assert set(packed.trained.row.tolist()) == {0, 2}


def test_identical_rows_share_everything():
    rows = [row(list(range(5, 45)), 20, run=r) for r in range(3)]
    packed = pack_rows(TrainBatch.from_experiences(rows))
    assert len(packed.token_ids) == 39
    assert packed.source.tolist() == [*range(19, 39)] * 3


def test_a_conversation_may_have_more_turns_than_python_has_frames():
    """Each turn is a row that begins with the one before."""
    num_turns = 1500
    rows = [row(list(range(1, 22 + turn)), 20 + turn) for turn in range(num_turns)]
    packed = pack_rows(TrainBatch.from_experiences(rows))
    assert len(packed.token_ids) < 2 * num_turns
    assert packed.trained.target.tolist() == [21 + turn for turn in range(num_turns)]
    predicted = packed.token_ids[packed.source] + 1
    assert predicted.tolist() == packed.trained.target.tolist()
