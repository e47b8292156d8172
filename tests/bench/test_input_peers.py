"""The input benchmark's contestants do the same work: the same squares, from the same distribution of crops."""

import multiprocessing
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.bench import input_peers as peers
from lockstep.bench.input_peers import AREA, RATIO, STD, Contestant, Setting, build_contestants, draw_box
from lockstep.data.augment import draw_crops, random_crops
from lockstep.data.sources import scan_folder


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    random = np.random.default_rng(0)
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        coarse = Image.fromarray(random.integers(0, 256, (5, 7, 3), dtype=np.uint8))
        coarse.resize((70, 50), Image.Resampling.BICUBIC).save(folder / f"{number}.jpeg", quality=95)
    return Setting(scan_folder(tmp_path, ("photos",)), 16, 4, 1, torch.device("cpu"))


def by_name(setting: Setting) -> dict[str, Contestant]:
    return {contestant.name: contestant for contestant in build_contestants(setting)}


def test_lockstep_and_pillow_take_part_everywhere(setting: Setting) -> None:
    assert list(by_name(setting))[:2] == ["lockstep", "dataloader-pillow"]


def test_given_the_same_crop_they_make_the_same_square(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    contestants, data = by_name(setting), setting.source.read(0)
    draws = draw_crops(0, 0, np.arange(1), AREA, RATIO, True)
    top, left, height, width = random_crops(np.array([[50, 70]]), draws.crops, RATIO)[0].tolist()
    monkeypatch.setattr(peers, "draw_box", lambda *sides: (left, top, width, height))
    monkeypatch.setattr(torch, "rand", lambda count: torch.tensor([0.0 if draws.flips[0] else 1.0]))
    own, pillow = (contestants[name] for name in ("lockstep", "dataloader-pillow"))
    ours = own.crop([own.decode(data)])[0]
    theirs = pillow.crop([pillow.decode(data)])[0].permute(1, 2, 0).numpy()
    assert theirs.shape == (16, 16, 3)
    # Two levels: decoders of different builds differ by one, and so do the two roundings.
    assert np.abs(ours - theirs).max() < 2.5 / 255 / min(STD)


def test_their_crops_have_the_same_distribution() -> None:
    torch.manual_seed(0)
    count = 4000
    theirs = np.array([draw_box(400, 300) for _ in range(count)], dtype=float)
    draws = draw_crops(0, 0, np.arange(count), AREA, RATIO, True)
    ours = random_crops(np.tile([300, 400], (count, 1)), draws.crops, RATIO)[:, [1, 0, 3, 2]]
    for measure in (lambda b: b[:, 2] * b[:, 3], lambda b: b[:, 2] / b[:, 3], lambda b: b[:, 0], lambda b: b[:, 1]):
        quantiles = [np.quantile(measure(boxes), np.linspace(0.1, 0.9, 9)) for boxes in (ours, theirs)]
        assert np.abs(quantiles[0] - quantiles[1]).max() < 0.04 * np.ptp(measure(ours))


@pytest.mark.parametrize("name", ["lockstep", "dataloader-pillow"])
def test_a_pipeline_goes_on_past_the_end_of_an_epoch_and_stops_when_closed(setting: Setting, name: str) -> None:
    with by_name(setting)[name].open(2) as batches:
        assert sum(next(batches) for _ in range(5)) > 2 * setting.source.num_samples
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-decode")]
