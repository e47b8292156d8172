"""Plain values between ranks: what is sent arrives, and what arrives is never run."""

import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.comm import values
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from tests.ranks import over_nccl, run_ranks, world_of_one

VALUE = {"text": "Grüße \udcff", "numbers": [1, 2**60, 0.1, -0.0], "none": None, "pair": (True, [])}
ARRIVED = VALUE | {"pair": [True, []]}


def exchange(world: World) -> tuple[Any, list[Any], bytes, bytes]:
    value = VALUE if world.is_first else None
    own = "x" * (1000 * world.rank)  # messages of several lengths, an empty one among them
    data = bytes(range(256)) if world.is_first else b""
    return (
        world.broadcast_value(value),
        world.gather_values(own),
        world.broadcast_bytes(data),
        world.broadcast_bytes(b""),
    )


@pytest.mark.parametrize("backend", ["gloo", over_nccl()])
def test_what_rank_0_sends_arrives_and_tuples_become_lists(backend: Any) -> None:
    for value, gathered, data, nothing in run_ranks(exchange, 3, backend=backend):
        assert value == ARRIVED
        assert [len(text) for text in gathered] == [0, 1000, 2000]
        assert (data, nothing) == (bytes(range(256)), b"")


def test_a_world_of_one_sees_what_many_ranks_would_see() -> None:
    world = world_of_one()
    assert world.broadcast_value(VALUE) == ARRIVED
    assert world.gather_values((1, 2)) == [[1, 2]]
    assert math.isnan(world.broadcast_value(math.nan))


class Trap:
    """A pickle that leaves a file when it is read."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.file, "w")


def receive_trap(world: World, file: str) -> str:
    if world.is_first:
        values.encode = lambda value: pickle.dumps(Trap(file))
    try:
        world.broadcast_value(1)
    except LockstepError as error:
        return str(error)
    return ""


def test_a_pickle_that_arrives_is_a_sentence_and_runs_nothing(tmp_path: Path) -> None:
    for sentence in run_ranks(receive_trap, 2, str(tmp_path / "trap")):
        assert "sent what is no value" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"\xff", b"{", b"[" * 100_000])
def test_what_is_no_json_is_a_sentence(data: bytes) -> None:
    with pytest.raises(LockstepError, match="no value"):
        values.decode(data)


def send_too_much(world: World) -> list[str]:
    sentences = []
    for send in (
        lambda: world.broadcast_bytes(b"12345" if world.is_first else b"", most=4),
        lambda: world.gather_values("long" if world.rank else ""),
    ):
        values.MAX_GATHERED_BYTES = 4
        try:
            send()
        except LockstepError as error:
            sentences.append(str(error))
    return sentences


def test_a_message_beyond_the_bound_is_a_sentence_on_every_rank() -> None:
    for sentences in run_ranks(send_too_much, 2):
        assert len(sentences) == 2


def send_from_a_liar(world: World) -> str:
    """Rank 0 claims a count that no rank should make room for."""
    if world.is_first:
        torch.distributed.broadcast(torch.tensor([2**62]), src=0)
        return ""
    try:
        world.broadcast_value(None)
    except LockstepError as error:
        return str(error)
    return "no sentence"


def test_a_count_beyond_reason_makes_no_rank_ask_for_that_memory() -> None:
    assert "4,611,686,018,427,387,904 bytes" in run_ranks(send_from_a_liar, 2)[1]
