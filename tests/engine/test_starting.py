"""Which run a command means: started, gone on with, or refused with a sentence that says why."""

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from lockstep.config import to_toml
from lockstep.engine import starting
from lockstep.engine.starting import (
    Resume,
    find_last_run,
    has_finished,
    list_changes,
    make_absolute,
    phrase_go_on,
    plan_start,
    read_recipe_name,
)
from lockstep.errors import LockstepError
from lockstep.events import Notice, RunStarted, encode
from lockstep.recipes.read import load_recipe
from lockstep.restarts import OUTCOME

STARTED = RunStarted(
    run="r", recipe="quickstart", config={}, world_size=1, device="", num_train=1, num_val=1, num_classes=1,
    num_parameters=1, steps_total=1, steps_per_epoch=1, start_step=0, versions={},
)  # fmt: skip


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "_num_unnamed", Counter())
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM"))]:
        monkeypatch.delenv(name)


def leave_run(folder: Path, *settings: str) -> Path:
    """A run that has been started."""
    folder.mkdir(parents=True)
    config = make_absolute(load_recipe("quickstart", settings)[1])
    (folder / "config.toml").write_text(to_toml(config))
    (folder / "events.jsonl").write_text(
        "\n".join(encode(event) for event in (Notice(level="info", text="hello"), STARTED)) + "\n"
    )
    return folder


def test_auto_starts_where_nothing_is_and_goes_on_where_a_run_is() -> None:
    settings = ["optim.lr=0.5"]
    first = plan_start("quickstart", settings, Path("run"), "auto")
    assert (first.name, first.folder, first.resume) == ("quickstart", Path("run"), False)
    leave_run(Path("run"), *settings)
    again = plan_start("quickstart", settings, Path("run"), "auto")
    assert (again.name, again.folder, again.resume) == ("quickstart", Path("run"), True)
    assert again.config == first.config


def test_auto_says_what_differs_from_the_run_that_is_there() -> None:
    leave_run(Path("run"))
    with pytest.raises(LockstepError, match=r"run holds a run with other settings: optim\.lr was .* and is 0\.25\."):
        plan_start("quickstart", ["optim.lr=0.25"], Path("run"), "auto")
    with pytest.raises(LockstepError, match=r"model\.name was \"resnet18\" and is \"resnet50\""):
        plan_start("resnet50-256", [], Path("run"), "auto")


def test_auto_needs_a_folder_to_find_the_run_in() -> None:
    with pytest.raises(LockstepError, match="--resume=auto needs --out"):
        plan_start("quickstart", [], None, "auto")
    leave_run(Path("run"))
    assert plan_start("run", [], None, "auto").resume


def test_a_runs_folder_alone_is_asked_about_and_never_started_anew() -> None:
    leave_run(Path("run"))
    with pytest.raises(LockstepError, match=r"run is a run's folder; add --resume .*, or --out"):
        plan_start("run", [], None, "no")
    assert plan_start("run", [], None, "yes").resume
    other = plan_start("run", [], Path("other"), "no")
    assert (other.folder, other.resume) == (Path("other"), False)


def test_a_folder_that_has_a_recipes_name_does_not_hide_the_recipe() -> None:
    leave_run(Path("quickstart"))
    assert not plan_start("quickstart", [], None, "no").resume


def test_a_resume_of_what_is_no_run_is_a_sentence() -> None:
    Path("empty").mkdir()
    with pytest.raises(LockstepError, match=r"empty is not a run's folder"):
        plan_start("empty", [], None, "yes")


def test_paths_hold_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nodes.toml").touch()
    settings = ["data.source=folder", "data.path=pictures", "comm.cluster=nodes.toml"]
    config = plan_start("quickstart", settings, None, "no").config
    assert config.data.path == str(tmp_path / "pictures")
    assert config.comm.cluster == str(tmp_path / "nodes.toml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    away = plan_start("quickstart", ["data.source=folder", "data.path=~/p", "comm.cluster=a-name"], None, "no").config
    assert (away.data.path, away.comm.cluster) == (str(tmp_path / "home" / "p"), "a-name")
    assert plan_start("quickstart", [], None, "no").config.data.path == ""


def test_the_recipes_name_survives_a_resume(tmp_path: Path) -> None:
    run = leave_run(Path("my-run"))
    assert plan_start("my-run", [], None, "yes").name == "quickstart"
    later = json.loads(encode(STARTED)) | {"recipe": "my-run", "start_step": 3}
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps(later) + "\n")
    assert read_recipe_name(run) == "quickstart"


@pytest.mark.parametrize(
    "content", ["", "{torn", '{"kind": "RunStarted", "recipe": 3}', '{"kind": "RunStarted"}', "\0"]
)
def test_a_log_that_names_no_recipe_leaves_the_folders_name(content: str) -> None:
    run = leave_run(Path("my-run"))
    (run / "events.jsonl").write_text(content)
    assert read_recipe_name(run) == "my-run"
    (run / "events.jsonl").unlink()
    assert read_recipe_name(run) == "my-run"


def test_what_changed_is_listed_setting_by_setting() -> None:
    before, now = (load_recipe("quickstart", settings)[1] for settings in ([], ["train.duration=7st", "train.seed=3"]))
    assert list_changes(before, before) == []
    assert [change.partition(" ")[0] for change in list_changes(before, now)] == ["train.duration", "train.seed"]


@pytest.mark.parametrize(
    ("content", "is_finished"),
    [
        ('{"status": "finished"}', True),
        ('{"status": "failed"}', False),
        ("[]", False),
        ("{", False),
        ("[" * 10**5, False),
    ],
)
def test_only_a_summary_that_says_so_is_of_a_finished_run(content: str, is_finished: bool) -> None:
    Path("run").mkdir()
    assert not has_finished(Path("run"))
    Path("run/summary.json").write_text(content)
    assert has_finished(Path("run")) == is_finished


def test_the_command_that_goes_on_is_whole() -> None:
    assert phrase_go_on(Path("my run"), "2") == "lockstep train 'my run' --resume --ranks 2"
    assert phrase_go_on(Path("run"), "2:8", restarts=3, log="wandb,mlflow") == (
        "lockstep train run --resume --ranks 2:8 --restarts 3 --log wandb,mlflow"
    )
    assert phrase_go_on(Path("run"), None) == "started as before, with: lockstep train run --resume"


TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_MAX_RESTARTS": "2"}
SLURM = {"SLURM_JOB_ID": "12"}


def enter_job(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], restarts: int = 0) -> None:
    """A process of a job, which has been started again so often."""
    monkeypatch.setattr(starting, "_num_unnamed", Counter())
    count = "SLURM_RESTART_COUNT" if variables == SLURM else "TORCHELASTIC_RESTART_COUNT"
    for name, value in (variables | {count: str(restarts)}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("variables", "name"), [(TORCHRUN, "quickstart-job-a"), (SLURM, "quickstart-slurm-12")])
def test_a_run_that_is_started_again_goes_on_with_what_its_job_began_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    leave_run(Path("runs/quickstart-20200101-000000"))
    leave_run(Path("runs/quickstart-slurm-1"))
    leave_run(Path("runs/quickstart-job-b"))
    for restarts in (0, 1):  # the first time it was lost before its configuration was there
        enter_job(monkeypatch, variables, restarts)
        start = plan_start("quickstart", [], None, "no")
        assert (start.folder, start.resume) == (Path("runs", name), False)
    leave_run(start.folder)
    enter_job(monkeypatch, variables, 2)
    again = plan_start("quickstart", [], None, "no")
    assert (again.folder, again.resume, again.config) == (start.folder, True, start.config)
    enter_job(monkeypatch, variables, 2)
    with pytest.raises(LockstepError, match=r"holds a run with other settings: optim\.lr was .*\. Give --out\."):
        plan_start("quickstart", ["optim.lr=0.25"], None, "no")


@pytest.mark.parametrize("run", ["", "none", "static"])
def test_a_run_that_is_started_again_and_that_nothing_tells_from_others_needs_its_folder(
    monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    leave_run(Path("runs/quickstart-20200101-000000"))
    enter_job(monkeypatch, TORCHRUN | {"TORCHELASTIC_RUN_ID": run})
    assert plan_start("quickstart", [], None, "no").folder.name > "quickstart-2025"
    enter_job(monkeypatch, TORCHRUN | {"TORCHELASTIC_RUN_ID": run}, 1)
    with pytest.raises(LockstepError, match=r"quickstart was started again, .*; give --out"):
        plan_start("quickstart", [], None, "no")
    assert not plan_start("quickstart", [], Path("run"), "no").resume
    leave_run(Path("run"))
    assert plan_start("quickstart", [], Path("run"), "no").resume


def test_a_run_of_another_job_by_the_same_name_is_not_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody gives all his jobs one --rdzv-id; the folder is then refused, as it holds a run."""
    folder = leave_run(Path("runs/quickstart-job-a"))
    enter_job(monkeypatch, TORCHRUN, 1)
    monkeypatch.setattr(starting, "read_agent_start", lambda: time.time() + 10)
    start = plan_start("quickstart", [], None, "no")
    assert (start.folder, start.resume) == (folder, False)
    enter_job(monkeypatch, TORCHRUN, 1)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # requeued, and the agent with it
    assert plan_start("quickstart", [], None, "no").resume


@pytest.mark.parametrize("out", [None, Path("runs/quickstart-job-a")])
@pytest.mark.parametrize("restarts", [0, 1])
def test_under_torchrun_a_run_is_gone_on_with_if_it_was_begun_under_this_agent(
    monkeypatch: pytest.MonkeyPatch, out: Path | None, restarts: int
) -> None:
    """Whatever it counts: not a start for a node that has come, but one after another's folder was refused."""
    folder = leave_run(Path("runs/quickstart-job-a"))
    for age_s, resume in ((10, True), (-10, False)):
        enter_job(monkeypatch, TORCHRUN, restarts)
        monkeypatch.setattr(starting, "read_agent_start", lambda age_s=age_s: time.time() - age_s)
        start = plan_start("quickstart", [], out, "no")
        assert (start.folder, start.resume) == (folder, resume)


def test_our_own_launcher_is_believed_whatever_the_clocks_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has looked into the folder itself, and a file server's clock may be behind."""
    folder = leave_run(Path("run"))
    monkeypatch.setattr(starting, "read_agent_start", lambda: time.time() + 10)
    for restarts in (0, 1):
        enter_job(monkeypatch, TORCHRUN | {OUTCOME: "word"}, restarts)
        assert plan_start("quickstart", [], folder, "no").resume == bool(restarts)


def test_a_slurm_jobs_next_command_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(monkeypatch, SLURM)
    leave_run(plan_start("quickstart", [], None, "no").folder)
    enter_job(monkeypatch, SLURM)
    second = plan_start("quickstart", [], None, "no")
    assert not second.resume
    assert second.folder.name != "quickstart-slurm-12"


def test_a_program_that_trains_several_times_finds_each_of_its_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(monkeypatch, TORCHRUN)
    seeds = ["train.seed=1", "train.seed=2"]
    first = [plan_start("quickstart", [seed], None, "no").folder for seed in seeds]
    assert [folder.name for folder in first] == ["quickstart-job-a", "quickstart-job-a-2"]
    for folder, seed in zip(first, seeds, strict=True):
        leave_run(folder, seed)
    enter_job(monkeypatch, TORCHRUN, 1)
    again = [plan_start("quickstart", [seed], None, "no") for seed in seeds]
    assert [(start.folder, start.resume) for start in again] == [(folder, True) for folder in first]


def test_the_newest_run_is_found_also_by_its_jobs_name() -> None:
    old = leave_run(Path("runs/quickstart-20200101-000000"))
    assert find_last_run("quickstart") == old
    job = leave_run(Path("runs/quickstart-job-a"))
    assert find_last_run("quickstart") == job
    os.utime(job / "config.toml", (1e9, 1e9))
    assert find_last_run("quickstart") == old


@pytest.mark.parametrize("resume", ["no", "yes", "auto"])
def test_a_name_that_no_folder_can_have_is_a_sentence(resume: Resume) -> None:
    with pytest.raises(LockstepError, match=r"^--out is too long for a folder's name \(300 bytes\); choose a shorter"):
        plan_start("quickstart", [], Path("x" * 300), resume)
