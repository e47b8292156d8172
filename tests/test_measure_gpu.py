"""The list of GPU measurements: its commands exist, and it goes on where it was stopped."""

import importlib.util
import json
import shlex
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lockstep.report.sweep_rows import write_word
from lockstep.sweeps import Sweep, open_sweep
from tests.test_documented import parse

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_gpu", ROOT / "experiments" / "measure_gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def test_every_command_exists_with_its_options(script: ModuleType, tmp_path: Path) -> None:
    for one in script.MEASUREMENTS:
        words = shlex.split(script.build_command(one, tmp_path, "a folder"))
        assert not any("{" in word for word in words)
        if words[0] != "make":
            assert words[1:3] == ["-m", "lockstep"]
            parse(words[3:])
        if words[3:4] == ["sweep"]:
            assert (ROOT / words[4]).is_file()


def test_what_is_done_is_not_done_again_and_what_fails_is(script: ModuleType, tmp_path: Path) -> None:
    good = replace(script.MEASUREMENTS[0], name="good", command="make --version")
    bad = replace(good, name="bad", command="make no-such-thing")
    assert script.measure(good, tmp_path, "", 60).startswith("done after")
    assert b"GNU Make" in (tmp_path / "good.log").read_bytes()
    assert script.measure(good, tmp_path, "", 60) == "was done before"
    for _ in range(2):
        assert script.measure(bad, tmp_path, "", 60).startswith("failed after 0 s, with 2")
    for left_s in (0, script.END_S + 0.3):
        assert script.measure(bad, tmp_path, "", left_s) == "no time left"


def test_what_is_cut_off_writes_what_it_has_and_leaves_nothing_running(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "import signal, subprocess, sys, time",
        "from pathlib import Path",
        "signal.signal(signal.SIGINT, signal.default_int_handler)",  # also where the tests run in the background
        "deaf = 'import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)'",
        "child = subprocess.Popen([sys.executable, '-c', deaf])",
        "print('begun', child.pid)",
        "try:",
        "    time.sleep(60)",
        "except KeyboardInterrupt:",
        "    print('so far')",
    ]
    (tmp_path / "long.py").write_text("\n".join(lines))
    command = shlex.join([sys.executable, str(tmp_path / "long.py")])
    monkeypatch.setattr(script, "build_command", lambda *_: command)
    one = replace(script.MEASUREMENTS[0], name="long", limit_s=3)
    assert script.measure(one, tmp_path, "", 60) == "cut off after 3 s"
    begun, so_far = (tmp_path / "long.log").read_text().splitlines()
    assert so_far == "so far"
    assert wait_for_end(int(begun.split()[1]))
    assert not (tmp_path / "long.done").exists()


def wait_for_end(pid: int) -> bool:
    """Whether a process is over within seconds."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def open_tiny_sweep(out: Path, data: Path) -> Sweep:
    """Four trials, of which none has begun."""
    file = out / "tiny.toml"
    file.write_text(
        'recipe = "quickstart"\ndescription = "Two rates, two seeds."\nseeds = [0, 1]\n'
        '[[cells]]\nname = "sgd"\n[grid]\noptim.lr = [0.1, 0.2]\n'
    )
    settings = ["data.source=folder", f"data.path={data}"]
    return open_sweep(file, out / "sweep", settings)


def test_a_sweep_goes_on_elsewhere_from_a_small_file(script: ModuleType, tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "gpu.tar.gz"
    here.mkdir()
    there.mkdir()
    sweep = open_tiny_sweep(here, tmp_path / "data")
    over, failed, begun, _ = (here / "sweep" / trial.folder for trial in sweep.trials)
    for run in (over, failed, begun):
        (run / "checkpoints" / "step-00000001").mkdir(parents=True)
        (run / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
        (run / "config.toml").write_text("[data]\n")
        (run / "events.jsonl").write_text("{}\n")
        (run / "report.html").write_text("large")
    (over / "summary.json").write_text(json.dumps({"top1": 0.5}))
    write_word(over, "finished")
    write_word(failed, "failed", "no space")
    (here / "tests.done").touch()
    (here / "huge.json").write_bytes(b" " * (script.MOST_BYTES + 1))
    script.write_archive(here, archive)
    script.take_up(archive, there)
    found = {str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()}
    run = f"sweep/{sweep.trials[0].folder}"
    assert found == {"tests.done", *(f"{run}/{name}" for name in ("events.jsonl", "summary.json", "trial.json"))}
    rows = open_tiny_sweep(there, tmp_path / "elsewhere").rows()
    assert [(row.status, row.top1) for row in rows] == [("finished", 0.5), *[("pending", None)] * 3]
    # And on from there, into the same file; what is newer than the file stays.
    (there / "tests.done").write_text("newer")
    script.take_up(archive, there)
    assert (there / "tests.done").read_text() == "newer"
    script.write_archive(there, archive)
    with tarfile.open(archive) as packed:
        assert set(packed.getnames()) == found


def test_an_archive_that_is_none_is_a_sentence(script: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / "gpu.tar.gz"
    script.take_up(archive, tmp_path)  # none yet: a first start
    for content in (b"nothing", b""):
        archive.write_bytes(content)
        with pytest.raises(SystemExit, match=r"gpu.tar.gz cannot be taken up \("):
            script.take_up(archive, tmp_path)


def test_a_name_that_is_none_is_a_sentence(script: ModuleType) -> None:
    assert [one.name for one in script.choose("ddp-4, tests")] == ["ddp-4", "tests"]
    with pytest.raises(SystemExit, match="There is no measurement ddp-5"):
        script.choose("ddp-5")
