"""What a run says of its input: bad samples are counted over all ranks and named once."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.comm.world import World
from lockstep.data.reader import SampleReader
from lockstep.data.workshop import Crew
from lockstep.engine.input_report import InputReport
from lockstep.errors import SharedError
from lockstep.events import Event
from tests.ranks import run_ranks


class Source:
    """Ten samples that nobody reads."""

    num_samples = 10
    labels = np.zeros(10, np.int64)

    def read(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        return f"{index}.jpg"


class Listener:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def emit(self, event: Event) -> None:
        self.texts.append(event.text)  # type: ignore[attr-defined]


def pipeline(bad: dict[int, str], bad_share: float = 1.0) -> Any:
    crew = Crew("cpu", 1, 0, threads_help=True, is_resident=False, images_per_second=None)
    return SimpleNamespace(
        bad=bad,
        reader=SampleReader(Source(), bad_share),
        describe=lambda: "Input: a thread.",
        depth=2,
        crew=lambda: crew,
    )


def meet_bad(world: World) -> tuple[int, str]:
    """Two ranks with two bad samples each, one of them the same, where three are allowed and then two."""
    mine = pipeline({0: {1: "1.jpg (torn)", 2: "2.jpg (torn)"}, 1: {2: "2.jpg (torn)", 3: "3.jpg (torn)"}}[world.rank])
    report = InputReport(world, Listener())
    mine.reader.max_bad = 3
    count = report.name_bad(mine, "left out")
    mine.reader.max_bad = 2
    try:
        report.name_bad(mine, "left out")
    except SharedError as error:
        return count, str(error)
    return count, ""


def test_bad_samples_are_counted_over_all_ranks() -> None:
    for count, sentence in run_ranks(meet_bad, 2):
        assert count == 3
        assert sentence.startswith("3 of 10 samples cannot be read, and data.bad_share allows 2: 1.jpg (torn), 2.jpg")


def alone() -> Any:
    return SimpleNamespace(gather_values=lambda value: [value])


def test_a_bad_sample_is_named_once() -> None:
    listener = Listener()
    report = InputReport(alone(), listener)
    for bad in ({4: "4.jpg (empty)"}, {4: "4.jpg (empty)", 2: "2.jpg (torn)"}):
        report.name_bad(pipeline(bad), "its neighbour took its place")
    assert listener.texts == [
        "4.jpg (empty); its neighbour took its place.",
        "2.jpg (torn); its neighbour took its place.",
    ]


def test_how_batches_are_made_is_said_when_it_changes() -> None:
    listener = Listener()
    report = InputReport(alone(), listener)
    made = pipeline({})
    report.say_choice(made)
    report.say_choice(made)
    made.describe = lambda: "Input: two threads."
    report.say_choice(made)
    assert listener.texts == ["Input: a thread.", "Input: two threads."]


def test_more_than_allowed_stops_a_rank_alone_too() -> None:
    with pytest.raises(SharedError, match="1 of 10 samples"):
        InputReport(alone(), Listener()).name_bad(pipeline({1: "1.jpg (torn)"}, 0.0), "left out")
