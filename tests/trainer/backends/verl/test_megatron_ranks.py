"""Which ranks of Megatron work on the same rows, and which of them tell what came out."""

import pytest

from trinity.trainer.backends.verl.settings import MegatronSizes, VerlEngineSettings

LAYOUTS = {
    "copies": (MegatronSizes(), 2, [0, 1], [0, 1]),
    "matrices": (MegatronSizes(tensor=2), 4, [0, 0, 1, 1], [0, 2]),
    "stages": (MegatronSizes(pipeline=2), 4, [0, 1, 0, 1], [2, 3]),
    "all": (MegatronSizes(tensor=2, pipeline=2), 8, [0, 0, 1, 1, 0, 0, 1, 1], [4, 6]),
    "sequence": (MegatronSizes(context=2), 2, [0, 0], [0]),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_parts_of_the_rows_go_to_whole_copies_of_the_model(layout):
    sizes, world_size, parts, telling = LAYOUTS[layout]
    settings = VerlEngineSettings("model", strategy="megatron", megatron=sizes)
    ranks = range(world_size)
    assert [settings.part_of(rank, world_size) for rank in ranks] == parts
    assert [rank for rank in ranks if settings.tells(rank, world_size)] == telling
    assert settings.ranks_per_row * len(telling) == world_size
    assert settings.sequence_shares == sizes.context


def test_fsdp_shares_rows_along_the_sequence():
    settings = VerlEngineSettings("model", sequence_parallel=2)
    assert [settings.part_of(rank, 4) for rank in range(4)] == [0, 0, 1, 1]
    assert [rank for rank in range(4) if settings.tells(rank, 4)] == [0, 2]
