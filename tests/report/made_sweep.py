"""A sweep's results made by rule, written by the code that writes those of real ones. Nothing was trained."""

from pathlib import Path
from typing import Any

from lockstep.recipes.sweep_file import SweepFile
from lockstep.recipes.trials import Trial
from lockstep.report.sweep_rows import Row, to_json

BATCHES = (32, 256)
CELLS = ("momentum", "LARS")


def make_sweep(
    base: float = 0.5,
    lr: float = 0.1,
    cells: tuple[str, ...] = CELLS,
    settings: tuple[str, ...] = ("train.duration=6ep",),
    **changes: Any,
) -> str:
    """`sweep.json` of two cells at two batches, with two seeds whose top-1 lie 0.02 apart around `base` + 0.01."""
    sweep = SweepFile.model_validate(
        {"recipe": "quickstart", "target": 0.3, "seeds": [0, 1], "grid": {"train.global_batch": list(BATCHES)}}
        | changes
    )
    rows = [
        Row(
            Trial(
                cell,
                (("train.global_batch", batch),),
                0,
                seed,
                (("optim.lr", lr),),
                (*settings, f"optim.lr={lr}"),
                "1",
                "folder",
            ),
            "finished",
            top1=base + 0.02 * seed,
            steps_to=100.0 if seed else None,
            images_per_second=1000.0,
            wall_s=2.0,
        )
        for cell in cells
        for batch in BATCHES
        for seed in (0, 1)
    ]
    return to_json("made", sweep, rows, "abc1234")


def write_sweep(folder: Path, **changes: Any) -> Path:
    """The same as a sweep's folder has it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(make_sweep(**changes), encoding="utf-8")
    return folder
