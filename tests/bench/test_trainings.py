"""Whole trainings beside timm: what is asked for, what both sides do, what the rows say; timm is a stand-in."""

import io
import json
import math
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

from lockstep.bench import timm_training, trainings, trainings_report
from lockstep.bench.commands import bench
from lockstep.bench.timm_peers import Case
from lockstep.bench.timm_training import Trained, Training
from lockstep.bench.trainings import Side
from lockstep.engine.build import build_schedule
from lockstep.errors import LockstepError
from lockstep.events import StepDone

RED, BLUE = 0, 2  # channels
# Validation images of the first and the second class by their colour: a classifier by colour has 8 of 11 right.
VAL = ([RED] * 4 + [BLUE], [BLUE] * 4 + [RED] * 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(1)
    for split, colours in (("train", ([RED] * 13, [BLUE] * 13)), ("val", VAL)):
        for name, channels in zip(("cherry", "plum"), colours, strict=True):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number, channel in enumerate(channels):
                pixels = random.integers(0, 100, (24, 30, 3), np.uint8)
                pixels[:, :, channel] += 120
                Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "images"


def build_asked(**given: object) -> Training:
    case = Case("timm:tiny", 8, 16, "fp32", 2)
    return Training(**{"case": case, "samples": 26, "epochs": 3, "seed": 0, "lr": 0.01} | given)  # type: ignore[arg-type]


def name_colours(num_classes: int) -> dict[str, torch.Tensor]:
    """Weights of the stand-in's network that tell red from blue: the mean of either channel is a class's logit."""
    convolution, classifier = torch.zeros(8, 3, 3, 3), torch.zeros(num_classes, 8)
    for unit, channel in enumerate((RED, BLUE)):
        convolution[unit, channel, 1, 1] = classifier[unit, unit] = 1.0
    lifted = torch.full((8,), 9.0)  # above zero, whatever the pixel
    return {"0.weight": convolution, "0.bias": lifted, "4.weight": classifier, "4.bias": torch.zeros(num_classes)}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "--data is missing"),
        (["--data=none"], "--data none holds no train/"),
        (["--data=half"], "--data half holds no val/"),
        (["--data=images", "--batch=27"], "26 images to train with, fewer than a batch of 27"),
        (["--data=images", "--model=resnet50"], "--model resnet50 is none of timm's; write timm:NAME"),
        (["--data=images", "--seeds=0,one"], "--seeds 0,one is no list of seeds"),
        (["--data=images", "--seeds=1,1"], "--seeds 1,1 names a seed twice"),
        (["--data=images", "--weights=none.pth"], "--weights none.pth is no file"),
        (["--data=images", "--weights=images/val/plum/0.png"], "neither .safetensors nor .pth"),
        (["--data=images", "--json=none/rows.json"], "cannot be written"),
        (["--data=uneven", "--batch=2"], "train/ and val/ must hold the same classes"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_trained(
    options: list[str], sentence: str, timm: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("half/train/plum").mkdir(parents=True)
    for place in ("train/cherry", "train/plum", "val/plum"):
        (Path("uneven") / place).mkdir(parents=True)
        (Path("uneven") / place / "0.png").write_bytes((folder / "val/plum/0.png").read_bytes())
    result = CliRunner().invoke(bench, ["train", "--batch=8", *options])
    assert result.exit_code != 0
    assert isinstance(result.exception, LockstepError)
    assert sentence in str(result.exception)


def test_without_timm_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(LockstepError, match=r"`bench train` needs timm, .* `pip install timm`"):
        trainings.run(data=folder, batch=8)


@pytest.mark.parametrize(("epochs", "in_epoch"), [(2, 1), (2, 2), (3, 4), (5, 7)])
def test_both_sides_follow_one_schedule(epochs: int, in_epoch: int, timm: None) -> None:
    asked = build_asked(epochs=epochs, samples=8 * in_epoch)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=asked.lr)
    schedule = timm_training.build_schedule(optimizer, in_epoch, asked)
    theirs = []
    for step in range(epochs * in_epoch):
        theirs.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step + 1)
    rising = np.linspace(1e-5, 0.01, in_epoch + 1)[:-1]
    falling = 0.01 * np.cos(np.linspace(0, math.pi / 2, (epochs - 1) * in_epoch)) ** 2
    assert theirs == pytest.approx([*rising, *falling], abs=1e-12)
    ours = build_schedule(timm_training.build_config(with_data(asked)), in_epoch, epochs * in_epoch)
    assert theirs == pytest.approx([ours.lr_at(step) for step in range(epochs * in_epoch)], abs=1e-12)


def with_data(asked: Training, folder: Path = Path("images")) -> Training:
    case = asked.case
    return Training(**vars(asked) | {"case": Case(**vars(case) | {"data": str(folder), "threads": 1})})


def test_the_centre_of_an_evaluation_is_that_of_224_in_256_pixels() -> None:
    for size, resized in ((224, 256), (160, 182), (16, 18)):
        asked = with_data(build_asked(case=Case("timm:tiny", 8, size, "fp32", 2)))
        assert timm_training.build_config(asked).data.eval_resize == resized


def test_right_answers_are_counted_over_all_images_the_last_few_too() -> None:
    random = np.random.default_rng(3)
    images, labels = random.normal(size=(23, 3, 4, 4)).astype(np.float32), random.integers(0, 3, 23)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())  # the brightest channel wins
    batches = [(torch.tensor(images[at : at + 8]), torch.tensor(labels[at : at + 8])) for at in range(0, 23, 8)]
    right = int((images.mean((2, 3)).argmax(1) == labels).sum())
    found = timm_training.count_correct(network, batches, build_asked().case, torch.device("cpu"))
    assert found == (right, 23)


def test_timms_network_takes_what_fits_and_says_what_does_not(timm: None, tmp_path: Path) -> None:
    import timm as standin

    network, file = standin.create_model("tiny", num_classes=2), tmp_path / "seven.pth"
    drawn = network[4].weight.clone()
    torch.save(name_colours(7), file)
    assert timm_training.load_fitting(network, str(file)) == [
        f"{file}: timm's network takes 2 of 4 tensors; 2 left out."
    ]
    assert torch.equal(network[0].weight, name_colours(7)["0.weight"])
    assert torch.equal(network[4].weight, drawn)
    torch.save({"body.weight": torch.zeros(2)}, file)
    with pytest.raises(LockstepError, match="holds nothing that fits"):
        timm_training.load_fitting(network, str(file))


def test_our_speed_is_that_of_the_records_behind_the_first_epoch() -> None:
    # 7 steps an epoch; windows of 1, 4 and 5 steps, then 40 images in 2 s and 28 images in 2 s.
    told = [(1, 0.1, 50.0), (5, 1.0, 2.0), (10, 2.0, 5.0), (15, 20.0, 0.4), (19, 14.0, 0.5)]
    times = [100.0, 108.0, 133.0, 135.0, 137.0]
    records = [
        StepDone(
            time_s=time_s, step=step, epoch=step / 7, loss=1.0, top1=0.5, lr=0.1, images_per_second=rate,
            input_s=0.0, compute_s=step_s, comm_s=0.0, step_s=step_s,
        )
        for (step, rate, step_s), time_s in zip(told, times, strict=True)
    ]  # fmt: skip
    assert timm_training.measure_rate(records, 7) == pytest.approx((40 + 28) / 4)


def test_the_sides_change_places_from_seed_to_seed(timm: None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(trainings, "measure", lambda side, asked, say: order.append((side.name, asked.seed)))
    with pytest.raises(LockstepError, match="No training came to its end"):
        trainings.run(data=folder, models="timm:tiny", seeds="4,2", batch=8, console=Console(file=io.StringIO()))
    assert order == [("lockstep", 4), ("timm", 4), ("timm", 2), ("lockstep", 2)]


def test_a_training_that_fails_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "silent_end.py").write_text("raise SystemExit(3)")
    (tmp_path / "spoken_end.py").write_text("import sys\nprint('more')\nsys.exit('lockstep: no room.')")
    reasons = {"silent_end": "its process ended with exit code 3", "spoken_end": "no room."}
    for module, reason in reasons.items():
        said: list[str] = []
        side = Side("timm", lambda asked, folder, module=module: [module], lambda asked, folder: None)  # type: ignore[misc]
        assert trainings.measure(side, build_asked(seed=5), said.append) is None
        assert said == [f"left out: timm:tiny, timm, seed 5: {reason}"]


def test_the_table_has_means_deviations_and_their_difference() -> None:
    rights = {"lockstep": [90, 94, 95], "timm": [91, 92]}
    rows = [
        trainings_report.build_row(
            name, build_asked(seed=seed), Trained(right, 200, 600, 100.0 + seed, 3 << 30, []), 10.0 * (seed + 1)
        )
        for name, found in rights.items()
        for seed, right in enumerate(found)
    ]
    text = io.StringIO()
    trainings_report.describe(rows, Console(file=text, width=160))
    ours, theirs = (line.split() for line in text.getvalue().splitlines()[1:3])
    deviations = [statistics.stdev([right / 2 for right in found]) for found in rights.values()]
    error = math.sqrt(deviations[0] ** 2 / 3 + deviations[1] ** 2 / 2)
    cells = ["3", "46.50", "±", f"{deviations[0]:.2f}", "+0.75", "±", f"{error:.2f}", "101", "20", "3.0"]
    assert ours == ["timm:tiny", "lockstep", *cells]
    assert theirs == ["timm:tiny", "timm", "2", "45.75", "±", f"{deviations[1]:.2f}", "-", "100", "15", "3.0"]
    assert trainings_report.describe_side(rows[:1], rows[3:4])[1:3] == ["45.00 ± ?", "-0.50 ± ?"]


def test_both_sides_learn_and_leave_a_row_for_each_seed(timm: None, folder: Path, tmp_path: Path) -> None:
    file, text = tmp_path / "rows.json", io.StringIO()
    trainings.run(
        data=folder,
        models="timm:tiny",
        epochs=6,
        seeds="0,1",
        batch=4,
        image_size=16,
        lr=0.03,
        json_file=file,
        console=Console(file=text, width=160),
    )
    rows = json.loads(file.read_text())
    said = text.getvalue()
    assert [(row["name"], row["seed"]) for row in rows] == [
        ("lockstep", 0),
        ("timm", 0),
        ("timm", 1),
        ("lockstep", 1),
    ], said
    for row in rows:
        assert (row["correct"], row["total"]) == (8, 11), said  # all that colours tell
        assert row["top1"] == 8 / 11
        # Nothing is dropped by ours; timm's loader drops the two of the seventh batch.
        assert row["images"] == 6 * (26 if row["name"] == "lockstep" else 24)
        assert row["images_per_second"] * row["seconds"] > row["images"] * 5 / 6  # of which the first epoch is no part
        assert row["memory_bytes"] is None
        assert row["commit"] == trainings_report.read_commit()


def test_both_sides_start_from_the_weights_of_a_file(timm: None, folder: Path, tmp_path: Path) -> None:
    weights, text = tmp_path / "colours.pth", io.StringIO()
    torch.save(name_colours(2), weights)
    file = tmp_path / "rows.json"
    trainings.run(
        data=folder,
        models="timm:tiny",
        epochs=2,
        seeds="7",
        batch=8,
        image_size=16,
        lr=1e-12,  # nothing is learned
        weights=weights,
        json_file=file,
        console=Console(file=text, width=160),
    )
    rows = json.loads(file.read_text())
    assert [(row["name"], row["correct"], row["total"]) for row in rows] == [("lockstep", 8, 11), ("timm", 8, 11)]
    assert "takes 4 of 4 tensors; 0 left out" in text.getvalue()
