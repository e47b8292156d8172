"""Sweeps: what a file means, what is refused, and trials that end in every way, gone on with by the same command."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from lockstep import api, sweeps
from lockstep.api import Asked, Ended
from lockstep.cli import app
from lockstep.config import USUAL_PASS
from lockstep.errors import Diverged, LockstepError
from lockstep.recipes.read import load_recipe
from lockstep.recipes.sweep_file import Range, read_sweep
from lockstep.recipes.trials import MOST_TRIALS, draw, plan_trials, spread
from lockstep.report.page.sweep_page import draw_places
from lockstep.report.sweep_rows import Spread, find_places, tabulate
from lockstep.sweeps import Sweep, open_sweep, retry_failed, work, write_results, write_table

PLAIN = """
recipe = "quickstart"
target = 0.5
trials = 3
confirm = [1, 2]
[grid]
train.global_batch = [64, 256]
[[cells]]
name = "momentum"
set.optim.name = "sgd"
random.optim.lr = {log = [0.01, 1.0]}
scale.optim.lr = {at = 128, power = 0.5}
[[cells]]
name = "LARS"
random.optim.lr = {log = [0.1, 10]}
random.optim.weight_decay = {choice = [1e-4, 5e-4]}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "table.toml"
    path.write_text(text)
    return path


def test_a_file_is_the_trials_it_says(tmp_path: Path) -> None:
    sweep, recipe = read_sweep(write(tmp_path, PLAIN))
    trials = plan_trials(sweep, recipe, ["train.duration=3ep"])
    assert len(trials) == 2 * 2 * 3
    configs = [load_recipe(recipe, trial.settings)[1] for trial in trials]
    assert {config.optim.name for config in configs[:6]} == {"sgd"}
    assert {config.optim.name for config in configs[6:]} == {"lars"}
    assert [config.train.global_batch for config in configs] == [64] * 3 + [256] * 3 + [64] * 3 + [256] * 3
    assert {str(config.train.duration) for config in configs} == {"3ep"}
    # The same draw at both points of the grid, times the root of the ratio of their batches.
    for small, large in zip(configs[:3], configs[3:6], strict=True):
        assert large.optim.lr / small.optim.lr == pytest.approx(2.0, rel=1e-4)
    assert all(0.01 / math.sqrt(2) < config.optim.lr < 1 for config in configs[:3])
    assert len({trial.folder for trial in trials}) == len(trials)


def test_more_trials_leave_the_first_as_they_were(tmp_path: Path) -> None:
    few = plan_trials(*read_sweep(write(tmp_path, PLAIN)))
    many = plan_trials(*read_sweep(write(tmp_path, PLAIN.replace("trials = 3", "trials = 9"))))
    known = {trial.folder: trial for trial in many}
    assert all(known[trial.folder] == trial for trial in few)


@given(st.integers(0, 2**63 - 1), st.integers(1, 3))
def test_draws_leave_no_gaps(seed: int, num_keys: int) -> None:
    """Of eight points, as few as cells have, no two neighbours are further apart than 3 / 8 along any key."""
    keys = [f"key{place}" for place in range(num_keys)]
    points = [spread(seed, number, keys) for number in range(8)]
    for key in keys:
        values = sorted(point[key] for point in points)
        assert 0 <= values[0] < values[-1] < 1
        gaps = [after - before for before, after in itertools.pairwise(values)]
        assert max(*gaps, values[0] + 1 - values[-1]) < 3 / 8


def test_a_range_ends_where_it_says() -> None:
    assert Range(log=(0.01, 100.0)).at(0.5) == pytest.approx(1.0, rel=1e-3)
    assert Range(uniform=(1.0, 3.0)).at(0.25) == 1.5
    assert [Range(choice=["a", "b"]).at(share) for share in (0.0, 0.499, 0.5, 0.999)] == ["a", "a", "b", "b"]
    turns = {"optim.mu": Range(choice=[1.0, 10.0, 100.0])}
    assert [draw(0, number, turns)["optim.mu"] for number in range(4)] == [1.0, 10.0, 100.0, 1.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('recipe = "quickstrt"', "There is no recipe and no file quickstrt"),
        ("trials = 0", r"trials = 0 must be at least 1"),
        ("trails = 3", "A sweep has no key trails; the nearest is trials"),
        ("seeds = [0, 0]", r"seeds = \[0, 0\] must be whole numbers from 0 on, each once"),
        ("seeds = []", r"seeds = \[\] must be a list of values"),
        ("confirm = [0]", r"confirm = \[0\] holds seed 0"),
        ("target = nan", r"target = NaN must be a finite number"),
        ('measure = "steps_to"', 'measure = "steps_to" needs target'),
        ('measure = "speed"', "measure = \"speed\" must be 'top1'"),
        ("[grid]\noptim.lr = []", r"grid\.optim\.lr = \[\] must be a list of values"),
        ("[grid]\noptim.lr = 0.1", r"grid\.optim\.lr = 0\.1 must be a list of values"),
        ("[grid]\noptim.lr = [-1.0]", r"optim\.lr = -1\.0 must be above 0.*so in cell"),
        ("[grid]\noptim.lrr = [1.0]", r"There is no key optim\.lrr"),
        ("[grid]\ntrain.seed = [1]", r"train\.seed is what seeds"),
        ("[grid]\nranks = [0]", "ranks = 0 must be a whole number from 1"),
        ("[random]\noptim.lr = {log = [0.0, 1.0]}", "both above 0"),
        ("[random]\noptim.lr = {log = [2.0, 1.0]}", "with the lower first"),
        ("[random]\noptim.lr = {log = [0.1, 1.0], uniform = [0.1, 1.0]}", "one of uniform"),
        ("[random]\noptim.lr = {choice = []}", "must be a list of values"),
        ("[scale]\noptim.name = {at = 256}", "must name settings that are numbers"),
        ("[grid]\noptim.lr = [0.1]\n[random]\noptim.lr = {log = [0.1, 1.0]}", r"optim\.lr stands in \[grid\] and"),
        ('[[cells]]\nname = "a"\n[[cells]]\nname = "a"', 'Two cells have the name "a"'),
        ("[set]\na.b.c.d.e.f = 1", "settings by their names"),
        ("x = " + "[" * 3000, "is not valid TOML|is nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_file_is_a_sentence(change: str, words: str, tmp_path: Path) -> None:
    given_recipe = "" if change.startswith("recipe") else 'recipe = "quickstart"\n'
    with pytest.raises(LockstepError, match=words):
        plan_trials(*read_sweep(write(tmp_path, given_recipe + change)))


def test_absurd_sizes_are_refused(tmp_path: Path) -> None:
    values = list(range(1, 1001))
    text = f'recipe = "quickstart"\n[grid]\ntrain.global_batch = {values}\ntrain.log_every = {values}'
    with pytest.raises(LockstepError, match=f"has 1,000,000 trials and may have {MOST_TRIALS:,}"):
        plan_trials(*read_sweep(write(tmp_path, text)))


def test_settings_for_all_trials_are_not_those_that_vary(tmp_path: Path) -> None:
    sweep, recipe = read_sweep(write(tmp_path, PLAIN))
    for setting in ("optim.lr=1", "train.global_batch=8", "train.seed=1", "optim.name=sgd"):
        with pytest.raises(LockstepError, match="would override what this sweep varies"):
            plan_trials(sweep, recipe, [setting])


class Runs:
    """Stands for real runs: each has the accuracy 0.9 − |ln lr − ln 0.3| / 10 + seed / 1000, and some end badly."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.stop_after = 10**6
        self.bad: dict[str, Exception] = {}

    def carry_out(self, asked: Asked, **_: Any) -> Ended:
        assert asked.out is not None
        if len(self.taken) >= self.stop_after:
            return Ended(asked.out, "interrupted")
        self.taken.append(asked.out.name)
        if error := self.bad.get(asked.out.name):
            raise error
        _, config = load_recipe(asked.target, asked.settings)
        top1 = 0.9 - abs(math.log(config.optim.lr / 0.3)) / 10 + config.train.seed / 1000
        asked.out.mkdir(parents=True, exist_ok=True)
        points = [{"step": 40, "top1": top1 / 2, "wall_s": 1.0}, {"step": 80, "top1": top1, "wall_s": 2.0}]
        summary = {"status": "finished", "top1": top1, "best": points[1], "time_to_accuracy": points, "steps": 80}
        summary |= {"epochs": 8.0, "num_train": 1000, "wall_s": 2.0, "startup_s": 0.25, "images_per_second": 500.0}
        if config.optim.average:
            averages = [{"step": 40, "top1": 0.95, "wall_s": 1.0}]
            summary |= {"average_top1": 0.95 - top1 / 10, "average_time_to_accuracy": averages, "memory_bytes": 3 << 30}
        (asked.out / "summary.json").write_text(json.dumps(summary))
        (asked.out / "checkpoints").mkdir(exist_ok=True)
        return Ended(asked.out, "finished")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    fake = Runs()
    monkeypatch.setattr(api, "carry_out", fake.carry_out)
    return fake


def start(tmp_path: Path, text: str = PLAIN) -> Sweep:
    sweep = open_sweep(write(tmp_path, text), tmp_path / "out", [])
    retry_failed(sweep)
    return sweep


def test_the_best_of_each_cell_is_confirmed_with_other_seeds(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    lines: list[str] = []
    assert work(sweep, lines.append)
    assert len(runs.taken) == sweep.num_trials == 2 * 2 * (3 + 2)
    assert lines[-1].startswith("20 of 20, about 0:00 left: LARS, global_batch 256")
    for place in find_places(sweep.rows(), "top1"):
        group = [row for row in sweep.rows() if row.trial.cell == place.cell and row.trial.point == place.point]
        tuned = {row.trial.number: row.top1 for row in group if not row.trial.is_confirming}
        assert place.best is not None
        assert tuned[place.best.number] == max(tuned.values())
        assert (place.num_trials, place.num_bad, place.seeds, place.is_confirmed) == (3, 0, (1, 2), True)
        # Seeds 1 and 2 add 0.001 and 0.002 to what seed 0 had: by hand, mean 0.0015 and deviation 0.001 / √2.
        assert place.accuracy.mean == pytest.approx(max(tuned.values()) + 0.0015)
        assert place.accuracy.deviation == pytest.approx(0.001 / math.sqrt(2))
        assert (place.steps_to.mean, place.epochs_to.mean, place.images_to.mean) == (80, 8.0, 8000)
        assert (place.seconds_to.mean, place.images_per_second.mean, place.wall_s.mean) == (1.75, 500, 2)
        left = {row.trial.number for row in group if (sweep.root / row.trial.folder / "checkpoints").exists()}
        assert left == {place.best.number}


def test_the_same_command_goes_on_with_what_is_left(runs: Runs, tmp_path: Path) -> None:
    runs.stop_after = 7
    sweep = start(tmp_path)
    assert not work(sweep, lambda line: None)
    assert "7 of 20 trials are done; go on with: lockstep sweep" in sweep.phrase_go_on()
    runs.stop_after = 10**6
    again = start(tmp_path)
    assert work(again, lambda line: None)
    assert len(runs.taken) == len(set(runs.taken)) == 20
    write_results(again)
    told = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert len(told["rows"]) == 20
    assert {row["status"] for row in told["rows"]} == {"finished"}


def test_a_trial_that_ends_badly_is_a_row_and_the_sweep_goes_on(runs: Runs, tmp_path: Path) -> None:
    text = PLAIN.replace("confirm = [1, 2]", "confirm = []")
    names = [trial.folder for trial in start(tmp_path, text).trials]
    runs.bad = {
        names[0]: Diverged("The loss became nan."),
        names[1]: LockstepError("The disk is full."),
        names[2]: ZeroDivisionError("by zero"),
    }
    sweep = start(tmp_path, text)
    assert work(sweep, lambda line: None)
    assert [row.status for row in sweep.rows()[:4]] == ["diverged", "failed", "failed", "finished"]
    assert sweep.rows()[2].reason == "ZeroDivisionError: by zero"
    first = find_places(sweep.rows(), "top1")[0]
    assert (first.best, first.num_bad, first.accuracy.mean) == (None, 3, None)
    write_results(sweep)
    assert "The loss became nan." in (tmp_path / "out" / "sweep.html").read_text()
    # What has failed for outside causes is tried again, what diverged is not.
    runs.taken, runs.bad = [], {}
    assert work(start(tmp_path, text), lambda line: None)
    assert runs.taken == names[1:3]


def test_a_cell_without_a_best_has_no_second_stage_to_wait_for(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    assert sweep.num_trials == 2 * 2 * (3 + 2)
    runs.bad = {trial.folder: Diverged("The loss became nan.") for trial in sweep.trials[:3]}
    lines: list[str] = []
    assert work(sweep, lines.append)
    assert lines[-1].startswith("18 of 18, about 0:00 left")
    assert "18 of 18 trials are done" in sweep.phrase_go_on()


def test_averaged_weights_count_where_they_are_asked_for(runs: Runs, tmp_path: Path) -> None:
    """Their accuracy here is the greater, the worse the weights' own is, and they reach the target at step 40."""
    text = PLAIN.replace("confirm = [1, 2]", "confirm = []").replace("[grid]", "[set]\noptim.average = 0.9\n[grid]")
    found = {}
    for measure in ("top1", "average_top1"):
        (tmp_path / measure).mkdir()
        sweep = start(tmp_path / measure, f'measure = "{measure}"\n{text}')
        assert work(sweep, lambda line: None)
        place = find_places(sweep.rows(), measure)[0]
        rows = [row for row in sweep.rows() if (row.trial.cell, row.trial.point) == (place.cell, place.point)]
        assert place.accuracy.mean == max(getattr(row, measure) for row in rows)
        table = tabulate(sweep.file, [place])
        found[measure] = place.best, place.steps_to.mean, dict(zip(table.heads, table.rows[0], strict=True))
    assert found["top1"][0] != found["average_top1"][0]
    assert [found[measure][1] for measure in found] == [80, 40]
    assert found["average_top1"][2]["seconds to 50 %"] == "0.8"
    assert found["average_top1"][2]["GiB of a GPU"] == "3.0"


def test_a_cell_has_its_colour_in_every_chart(runs: Runs, tmp_path: Path) -> None:
    """Only LARS reaches the target, which leaves momentum out of the second chart."""
    sweep = start(tmp_path, PLAIN.replace("confirm = [1, 2]", "confirm = []"))
    assert work(sweep, lambda line: None)
    places = [
        replace(place, steps_to=Spread.of([]) if place.cell == "momentum" else place.steps_to)
        for place in find_places(sweep.rows(), "top1")
    ]
    charts = [draw_places(sweep.file, places, what) for what in ("accuracy", "steps_to")]
    colors = [{trace["name"]: trace["line"]["color"] for trace in chart.traces} for chart in charts if chart]
    assert list(colors[0]) == ["momentum", "LARS"]
    assert colors[1] == {"LARS": colors[0]["LARS"]}


def test_a_fault_that_meets_all_places_ends_the_sweep_at_the_second(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    runs.bad = {trial.folder: LockstepError("There is no folder cifar10.") for trial in sweep.trials}
    with pytest.raises(LockstepError, match=r"All 4 trials so far failed alike.*There is no folder cifar10\."):
        work(sweep, lambda line: None)
    assert runs.taken == [trial.folder for trial in sweep.trials[:4]]  # three of the first place, one of the second


def test_a_sweep_of_one_place_ends_when_two_trials_failed_alike(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path, 'recipe = "quickstart"\ntrials = 5\nrandom.optim.lr = {log = [0.1, 1.0]}\n')
    runs.bad = {trial.folder: LockstepError("There is no folder cifar10.") for trial in sweep.trials}
    with pytest.raises(LockstepError, match="All 2 trials so far failed alike"):
        work(sweep, lambda line: None)


def test_a_cell_that_cannot_work_does_not_keep_the_others_from_it(runs: Runs, tmp_path: Path) -> None:
    """Nor when the sweep is started again, and the failed trials are the first that are taken."""
    text = PLAIN.replace("confirm = [1, 2]", "confirm = []").replace("[64, 256]", "[64]")
    for _ in range(2):
        sweep = start(tmp_path, text)
        retry_failed(sweep)
        runs.bad = {trial.folder: LockstepError("Out of memory.") for trial in sweep.trials[:3]}
        assert work(sweep, lambda line: None)
        assert [row.status for row in sweep.rows()] == ["failed"] * 3 + ["finished"] * 3


def test_a_sweep_with_other_settings_is_not_mixed_in(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    folder = sweep.root / sweep.trials[0].folder
    folder.mkdir(parents=True)
    from lockstep.config import to_toml

    (folder / "config.toml").write_text(to_toml(load_recipe("quickstart", ["optim.lr=0.77"])[1]))
    with pytest.raises(LockstepError, match=r"holds a run with other settings: .*optim\.lr was 0\.77"):
        start(tmp_path)


def leave_table(sweep: Sweep) -> None:
    """All that is left is the table, as on another machine that it was carried to."""
    table = write_table(sweep).read_bytes()
    shutil.rmtree(sweep.root)
    sweep.root.mkdir()
    (sweep.root / "sweep.json").write_bytes(table)


def test_a_sweep_goes_on_from_its_table_alone(runs: Runs, tmp_path: Path) -> None:
    """Twice, within the first stage and within the second; what diverged stays so, what failed is tried again."""
    whole = start(tmp_path)
    names = [trial.folder for trial in whole.trials]
    runs.bad = {names[0]: Diverged("The loss became nan."), names[1]: LockstepError("The disk is full.")}
    for stop_after in (9, 17):
        runs.stop_after = stop_after
        sweep = start(tmp_path)
        assert not work(sweep, lambda line: None)
        leave_table(sweep)
        runs.bad.pop(names[1], None)
    runs.stop_after = 10**6
    sweep = start(tmp_path)
    assert work(sweep, lambda line: None)
    assert sorted({name for name in runs.taken if runs.taken.count(name) > 1}) == [names[1]]
    rows = sweep.rows()
    assert len(rows) == sweep.num_trials == len(set(runs.taken))
    assert rows[0].reason == "The loss became nan."
    assert {row.status for row in rows[1:]} == {"finished"}
    untouched = [replace(row, trial=rows[0].trial) for row in rows[2:5]]
    again = [replace(row, trial=rows[0].trial) for row in start(tmp_path).rows()[2:5]]
    assert untouched == again  # what the table tells is what the folders told
    assert all(row.steps_to == 80 and row.wall_s == 2.0 and row.top1 for row in untouched)


def test_a_table_of_other_settings_is_refused(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    assert work(sweep, lambda line: None)
    leave_table(sweep)
    with pytest.raises(LockstepError, match=r"tells of momentum.* with other settings: optim\.lr was .* and is"):
        start(tmp_path, PLAIN.replace("0.01, 1.0", "0.02, 2.0"))
    with pytest.raises(LockstepError, match=r"with other settings: ranks was 1 and is 2"):
        start(tmp_path, PLAIN.replace("[grid]", "[set]\nranks = 2\n[grid]"))
    assert all(row.steps_to == 80 for row in start(tmp_path).rows())
    moved_goal = start(tmp_path, PLAIN.replace("target = 0.5", "target = 0.6"))  # of which the table knows nothing
    assert all(row.is_settled and row.steps_to is None and row.top1 for row in moved_goal.rows())


@pytest.mark.parametrize(
    "table",
    ["", "[]", '{"rows": 3}', '{"rows": [3, {"status": "finished"}]}', '{"settings": {"optim.lr": "x"}, "rows": [%s]}'],
)
def test_a_table_that_tells_nothing_is_as_none(table: str, runs: Runs, tmp_path: Path) -> None:
    folder = start(tmp_path).trials[0].folder
    row = json.dumps({"status": "finished", "folder": folder, "settings": {"train.global_batch": 64}, "top1": 0.5})
    (tmp_path / "out" / "sweep.json").write_text(table.replace("%s", row))
    assert not any(row.is_settled for row in start(tmp_path).rows())


SMALL = """
recipe = "quickstart"
[set]
data.source = "folder"
data.image_size = 32
data.eval_resize = 32
model.width = 4
train.global_batch = 8
train.duration = "2st"
optim.warmup = "0st"
[grid]
optim.lr = [0.1, 0.2]
"""


def paint(root: Path, classes: str = "ab", count: int = 4) -> Path:
    """An image folder of plain squares."""
    for split, name, number in itertools.product(("train", "val"), classes, range(count)):
        path = root / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (40 * number, 100, 200)).save(path)
    return root


def test_a_sweep_knows_its_data_wherever_it_lies(tmp_path: Path) -> None:
    """By the labels: other data is refused, and where there is none the results are shown all the same."""
    out, file = tmp_path / "out", write(tmp_path, SMALL)

    def call(data: Path, *more: str) -> Result:
        arguments = ["sweep", str(file), "--out", str(out), "--set", f"data.path={data}", *more]
        return CliRunner().invoke(app, arguments)

    first = call(paint(tmp_path / "here"))
    assert first.exit_code == 0, first.output
    moved = shutil.copytree(tmp_path / "here", tmp_path / "there" / "images")
    broken = out / json.loads((out / "sweep.json").read_text())["rows"][1]["folder"]
    (
        broken / "trial.json"
    ).unlink()  # as if killed amid its last step: its folder goes on with the images that are here
    again = call(moved)
    assert again.exit_code == 0, again.output
    assert "1 of 2" not in again.output
    assert str(moved) in (broken / "config.toml").read_text()
    for folder in out.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    shown = call(moved, "--show")
    assert "2 of 2 trials are done" in shown.output
    gone = call(tmp_path / "nowhere")
    assert gone.exit_code == 0, gone.output
    assert "Wrote" in gone.output
    other = call(paint(tmp_path / "other", classes="abc"))
    assert other.exit_code == 1
    assert "with other settings: data.path was" in str(other.exception)
    back = call(tmp_path / "here", "--show")
    assert "2 of 2 trials are done" in back.output


def test_the_table_is_there_while_trials_go_on(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills the sweep leaves what is done."""
    told: list[int] = []
    carried_out = runs.carry_out

    def look(asked: Asked, **more: Any) -> Ended:
        table = tmp_path / "out" / "sweep.json"
        rows = json.loads(table.read_text())["rows"] if table.exists() else []
        told.append(sum(row["status"] == "finished" for row in rows))
        return carried_out(asked, **more)

    monkeypatch.setattr(api, "carry_out", look)
    arguments = ["sweep", str(write(tmp_path, PLAIN)), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert told == list(range(20))


def test_a_gpu_that_failed_ends_the_sweep(runs: Runs, tmp_path: Path) -> None:
    sweep = start(tmp_path)
    runs.bad = {sweep.trials[0].folder: RuntimeError("CUDA error: an illegal memory access")}
    with pytest.raises(LockstepError, match=r"The GPU failed in .* go on with: lockstep sweep"):
        work(sweep, lambda line: None)


def test_a_trial_that_another_process_has_is_left_to_it(runs: Runs, tmp_path: Path) -> None:
    mine, others = start(tmp_path), start(tmp_path)
    held = others.trials[0]
    assert sweeps.claim(others, held)
    assert not sweeps.claim(mine, held)
    sweeps.release(others, held)
    assert sweeps.claim(mine, held)
    sweeps.release(mine, held)


def test_a_real_sweep_from_the_command_line(tmp_path: Path) -> None:
    """Two trials of a few steps, a table, a page, and runs that other commands know."""
    text = """
    recipe = "quickstart"
    [set]
    data.train_images = 40
    data.val_images = 20
    data.image_size = 32
    data.eval_resize = 32
    model.width = 4
    train.global_batch = 20
    train.duration = "2st"
    optim.warmup = "0st"
    [grid]
    optim.lr = [0.1, 0.2]
    """
    out = tmp_path / "out"
    arguments = ["sweep", str(write(tmp_path, text)), "--out", str(out), "--set", "train.log_every=1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "1 of 2, about" in done.output
    assert "top-1" in done.output
    page = (out / "sweep.html").read_text()
    assert "chart-accuracy" in page
    told = json.loads((out / "sweep.json").read_text())
    assert [cell["point"] for cell in told["cells"]] == [{"optim.lr": 0.1}, {"optim.lr": 0.2}]
    folders = [str(out / row["folder"]) for row in told["rows"]]
    compared = CliRunner().invoke(app, ["compare", *folders], catch_exceptions=False)
    assert "optim.lr" in compared.output
    again = CliRunner().invoke(app, [*arguments, "--show"], catch_exceptions=False)
    assert "2 of 2 trials are done" in again.output


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[1] / "experiments").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_experiment_is_a_sweep_that_can_be_started(path: Path) -> None:
    sweep, recipe = read_sweep(path)
    trials = plan_trials(sweep, recipe)
    numbers = {
        sum(trial.place == place and trial.seed == sweep.seeds[0] for trial in trials)
        for place in {t.place for t in trials}
    }
    assert len(numbers) == 1  # as many trials for each cell
    for _, config in (load_recipe(recipe, trial.settings) for trial in trials):
        # What a GPU finds quickest must not decide how many samples batch norm sees: cells would differ by it.
        train = config.train
        assert train.global_batch <= USUAL_PASS or train.max_batch_per_rank or train.norm_batch or train.accumulate
