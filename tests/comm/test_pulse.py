"""Pulses through a real store: who is dead, who lags, and what each never sent."""

from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from lockstep.comm import pulse as module
from lockstep.comm.pulse import Lost, Pulse


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "LISTEN_S", 0.3)


@pytest.fixture
def pulses() -> Iterator[list[Pulse]]:
    store = HashStore()
    pulses = [Pulse(store, rank, 3) for rank in range(3)]
    for pulse in pulses:
        pulse.note(7, 2)
    yield pulses
    for pulse in pulses:
        pulse.close()


def test_living_ranks_at_the_same_place_are_not_lost(pulses: list[Pulse]) -> None:
    assert pulses[0].find_lost() is None


def test_a_rank_that_stops_beating_is_named_with_the_buffer_it_never_sent(pulses: list[Pulse]) -> None:
    pulses[2].note(7, 1)
    module.time.sleep(0.1)
    pulses[2].close()
    assert pulses[0].find_lost() == Lost(rank=2, is_dead=True, step=7, buffer=1)
    assert pulses[1].find_lost() == Lost(rank=2, is_dead=True, step=7, buffer=1)


def test_a_living_rank_that_lags_is_told_from_a_dead_one(pulses: list[Pulse]) -> None:
    pulses[1].note(6, 4)
    module.time.sleep(0.1)
    assert pulses[0].find_lost() == Lost(rank=1, is_dead=False, step=6, buffer=4)


def test_a_rank_that_never_beat_counts_as_dead() -> None:
    alone = Pulse(HashStore(), 0, 2)
    alone.note(1, 0)
    assert alone.find_lost() == Lost(rank=1, is_dead=True, step=0, buffer=0)
    alone.close()
