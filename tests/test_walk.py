"""The walk of docs/architecture.md names every file that a batch passes: a real run is followed from step to step."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.ranks import find_port

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lockstep"
NAME = re.compile(r"`([\w/]+\.py)`")
NUM_RANKS = 2
# A run of a few steps that does much of what a run may do.
SETTINGS = (
    "augment.mixup=0.2",
    "augment.policy=trivial",
    "comm.algorithm=doubling",
    "comm.tune_s=0",
    "data.train_images=40",
    "data.val_images=20",
    "data.image_size=32",
    "data.eval_resize=36",
    "model.width=8",
    "optim.average=0.9",
    "optim.warmup=0st",
    "train.global_batch=16",
    "train.duration=1ep",
    "train.checkpoint_every=2st",
    "train.log_every=1",
    "train.max_batch_per_rank=4",
)
# One rank, which notes the files of every function that is called from the first step to the end of the last.
FOLLOWED = """
import json, os, sys, threading
from pathlib import Path
from lockstep.api import Asked, carry_out
from lockstep.engine.trainer import Trainer

passed, is_followed = set(), False

def note(frame, event, value):
    if is_followed:
        passed.add(frame.f_code.co_filename)

loop = Trainer._loop

def follow(*arguments):
    global is_followed
    is_followed = True
    sys.setprofile(note)
    try:
        return loop(*arguments)
    finally:
        sys.setprofile(None)
        is_followed = False

Trainer._loop = follow
threading.setprofile(note)  # of threads that are started from here on
folder, *settings = sys.argv[1:]
carry_out(Asked("quickstart", tuple(settings), Path(folder) / "run"))
Path(folder, os.environ["RANK"]).write_text(json.dumps(sorted(passed)))
"""


def read_walk() -> list[str]:
    """The rows of the walk."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    walk = text.partition("\n## The walk")[2].partition("\n### ")[0]
    return [line for line in walk.splitlines() if line.startswith("|")]


def list_named(row: str) -> dict[str, set[str]]:
    """The names in a row, and the files each may mean: one without a folder lies in one that the row has named."""
    folders, named = {""}, dict[str, set[str]]()
    for name in NAME.findall(row):
        folders.add(name.rpartition("/")[0])
        places = {name} if "/" in name else {f"{folder}/{name}".lstrip("/") for folder in folders}
        named[name] = {place for place in places if (PACKAGE / place).is_file()}
    return named


def follow_run(folder: Path) -> set[str]:
    """The files of the package that two ranks pass between two steps."""
    world = {"WORLD_SIZE": f"{NUM_RANKS}", "LOCAL_WORLD_SIZE": f"{NUM_RANKS}", "MASTER_ADDR": "127.0.0.1"}
    world |= {"MASTER_PORT": f"{find_port()}", "PYTHONPATH": str(ROOT)}
    said = folder / "said"
    with said.open("w") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", FOLLOWED, str(folder), *SETTINGS],
                env=os.environ | world | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(NUM_RANKS)
        ]
    try:
        assert [rank.wait(120) for rank in ranks] == [0] * NUM_RANKS, said.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    passed = {Path(file) for rank in range(NUM_RANKS) for file in json.loads((folder / f"{rank}").read_text())}
    return {file.relative_to(PACKAGE).as_posix() for file in passed if file.is_relative_to(PACKAGE)}


def test_every_file_that_a_run_passes_between_two_steps_is_on_the_walk(tmp_path: Path) -> None:
    passed = follow_run(tmp_path)
    assert passed >= {"engine/step.py", "data/decode.py", "comm/reducer.py", "optim/lars.py", "report/run.py"}
    named = {file for row in read_walk() for files in list_named(row).values() for file in files}
    assert passed - named == set()


def test_every_file_on_the_walk_is_there() -> None:
    named = [(name, files) for row in read_walk() for name, files in list_named(row).items()]
    assert len(named) > 100
    assert [name for name, files in named if not files] == []


def test_the_layers_that_the_docs_show_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        assert "```\n" + "\n".join(layers) + "\n```" in (ROOT / page).read_text(), page
