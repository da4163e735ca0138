"""Which of the trainer's ranks an engine on several GPUs reads from."""

from trinity.common.models.protocol import WeightTicket
from trinity.synchronizer.ipc import METHOD, together


def test_the_ticket_of_all_ranks_tells_where_the_weights_are_on_each_gpu():
    ranks = [WeightTicket(3, METHOD, "digest", {f"gpu-{n}": bytes([n])}) for n in range(3)]
    ticket = together(ranks)
    assert ticket.payload == {"gpu-0": b"\0", "gpu-1": b"\1", "gpu-2": b"\2"}
    assert (ticket.version, ticket.method, ticket.digest) == (3, METHOD, "digest")


def test_of_another_channel_the_first_rank_has_the_ticket():
    first = WeightTicket(1, "memory", "digest", ["references"])
    assert together([first, WeightTicket(1, "", "", None)]) is first
