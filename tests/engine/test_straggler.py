"""Who holds the others up, named by real runs: a rank that computes longer, and nobody when all are alike."""

import time
from pathlib import Path

import pytest

from lockstep.comm.world import World
from lockstep.config import RunConfig
from lockstep.engine.build import build_parts, open_sources
from lockstep.engine.trainer import StopRequest, Trainer
from lockstep.events import Event, RunEnded
from tests.engine.conftest import tiny_config
from tests.ranks import run_ranks


class Listener:
    """Keeps the last record."""

    def __init__(self) -> None:
        self.last: Event | None = None

    def emit(self, event: Event) -> None:
        self.last = event

    def close(self) -> None:
        pass


def train(world: World, config: RunConfig, folder: Path, slow_rank: int) -> tuple[str, list[list[float]]]:
    """One rank's run; the backward pass of `slow_rank` takes 100 ms more."""
    sources = open_sources(config.data)
    parts = build_parts(config, world, sources)
    if world.rank == slow_rank:
        next(parts.model.children()).register_full_backward_hook(lambda *_: time.sleep(0.1))
    listener = Listener()
    Trainer(config, "tiny", world, sources, parts, folder, listener, StopRequest()).run()
    assert isinstance(listener.last, RunEnded)
    return listener.last.straggler, listener.last.rank_times


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_a_rank_that_sleeps_in_its_backward_pass_is_named_with_compute(
    images: Path, tmp_path: Path, slow_rank: int
) -> None:
    config = tiny_config(images, "train.eval_every=0st", "train.checkpoint_every=0st")
    for text, times in run_ranks(train, 3, config, tmp_path, slow_rank):
        assert text.startswith(f"Rank {slow_rank} holds the others up by")
        assert text.endswith(": compute.")
        computed = [compute_s for _, compute_s in times]
        assert len(computed) == 3
        assert computed[slow_rank] == max(computed) > 0.1
