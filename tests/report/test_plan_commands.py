"""`lockstep plan` as a user calls it: its answers, its files, its mistakes, and how soon it answers."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli import app
from lockstep.errors import LockstepError
from lockstep.events import PlanChosen, RunEnded, RunStarted, TimelineTaken, read_events
from lockstep.plan.device import to_json
from lockstep.report.page.run_page import write_report
from tests.plan.synthetic import synthesize


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(result.exception, LockstepError), result.output
    return str(result.exception)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    path.write_text(to_json(synthesize()), encoding="utf-8")
    return str(path)


def test_a_plan_answers_for_every_size_and_both_scalings(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    output = call(
        "resnet50-64k", "--cluster=dgx-h200", "--devices=64,8", f"--profile={profile}", f"--json={file}", "--rules"
    )
    assert "strong scaling" in output
    assert "weak scaling" in output
    assert "adamw, sharded" in output
    table = json.loads(file.read_text())
    rows = [(row["scaling"], row["devices"]) for row in table["predictions"]]
    assert rows == [("strong", 8), ("strong", 64), ("weak", 8), ("weak", 64)]
    assert all(row["advice"] and row["dollars"] for row in table["predictions"])
    assert table["impossible"] == []


def test_a_predicted_run_leaves_a_folder_that_the_report_draws(profile: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ["resnet50-64k", "--cluster=eth-10g", "--devices=64", f"--profile={profile}", f"--out={folder}"]
    call(*arguments)
    events = read_events(folder)
    kinds = [type(event) for event in events]
    assert kinds[0] is RunStarted
    assert kinds[-1] is RunEnded
    timeline = next(event for event in events if isinstance(event, TimelineTaken))
    lane = [span for span in timeline.spans if span["lane"] == "step"]
    # Without gaps: each span begins where the one before it ended, and they fill the whole.
    assert all(a["end_s"] == pytest.approx(b["start_s"]) for a, b in itertools.pairwise(lane))
    assert lane[-1]["end_s"] == pytest.approx(timeline.seconds)
    assert {span["name"] for span in lane} >= {"forward", "backward", "communicate", "update"}
    plan = next(event for event in events if isinstance(event, PlanChosen))
    assert plan.source == "predicted"
    assert sum(trial["chosen"] for trial in plan.trials) == 1
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    (prediction,) = json.loads((folder / "prediction.json").read_text())["predictions"]
    assert ended.efficiency == pytest.approx(prediction["efficiency"])
    page = write_report(folder).read_text(encoding="utf-8")
    assert "64 ranks" in page
    assert "predicted" in page
    assert "there already" in refuse(*arguments)


def test_the_fewest_devices_for_a_time_are_found(profile: str) -> None:
    output = call("resnet50-64k", "--cluster=dgx-h200", f"--profile={profile}", "--target-minutes=5")
    assert "are the fewest of dgx-h200 in 5 minutes" in output
    message = refuse("resnet50-64k", "--cluster=dgx-h200", f"--profile={profile}", "--target-minutes=0.001")
    assert "No cluster of dgx-h200 trains resnet50-64k in 0.001 minutes" in message


def test_clusters_are_listed() -> None:
    output = call("clusters")
    assert "dgx-h100" in output
    assert "The paper's cluster" in output


def test_validation_has_the_rows_that_others_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    output = call("--validate", f"--json={file}")
    assert "predicted against published" in output
    rows = json.loads(file.read_text())
    assert all({"run", "quantity", "published", "predicted", "calibrated"} <= set(row) for row in rows)
    assert {row["calibrated"] for row in rows} == {True, False}


def test_mistakes_are_one_sentence_each(profile: str, tmp_path: Path) -> None:
    assert "needs --cluster" in refuse("resnet50-64k")
    assert "Give a recipe" in refuse()
    assert "changes model.width, stem or shortcuts" in refuse("quickstart", "--cluster=dgx-h100")
    assert "did you mean dgx-h100" in refuse("resnet50-64k", "--cluster=dgx-h10")
    here = ["resnet50-256", "--cluster=dgx-h200", f"--profile={profile}"]
    assert "cannot be shared by 512 devices" in refuse(*here, "--devices=512")
    assert "is no list of sizes" in refuse(*here, "--devices=8,x")
    assert "is no list of sizes" in refuse(*here, "--devices=-8")
    assert "do not fill nodes" in refuse(*here, "--devices=9,17", "--set=train.global_batch=17")
    assert "one run's folder" in refuse(*here, "--devices=8,16", f"--out={tmp_path / 'run'}")
    assert "trains alexnet" in refuse("alexnet-64k", "--cluster=dgx-h200", f"--profile={profile}")
    assert "no device profile" in refuse(*here[:2], f"--profile={tmp_path / 'none.json'}")
    (tmp_path / "bad.json").write_text("{}")
    assert "damaged" in refuse(*here[:2], f"--profile={tmp_path / 'bad.json'}")
    assert "leave the recipe out" in refuse("resnet50-64k", "--validate")
    large = ["--set=train.global_batch=65536", "--set=train.max_batch_per_rank=65536", "--set=train.norm_batch=0"]
    assert "set train.max_batch_per_rank = " in refuse(*here, "--devices=1", *large)


def test_a_plan_for_2048_devices_answers_soon_and_without_torch(profile: str) -> None:
    code = (
        "import sys\nfrom lockstep.cli import app\n"
        f"app(['plan', 'resnet50-64k', '--cluster=dgx-h200', '--devices=2048', '--profile={profile}'],"
        " standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begun < 20  # takes less than 1 s on a free machine, and the suite's is not
