"""A list of GPU measurements, one after the other: python experiments/measure_gpu.py OUT [options]

Each is a command of this repository with a limit of time. OUT gets what it printed (NAME.log) and, where it writes
rows, NAME.json, as far as it came. One that has ended well is not run again, and a sweep goes on behind its last trial,
so that the same command goes on where it was stopped. `--only` picks by name, `--seconds` bounds the whole, `--show`
only lists. CIFAR-10, Imagenette, photographs and an older checkout are named by their folders; what needs one that is
not named is left out.

`--archive FILE` goes on on another machine: whatever came out and is small is written to that file after every
measurement, and what the file holds is taken up at the start.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKSTEP = f"{shlex.quote(sys.executable)} -m lockstep"
END_S = 20  # for a command that is cut off, to write down what it has
# What is printed is in the log at once, and so is each test's outcome.
VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTEST_ADDOPTS": "-vv"}
# What an archive holds: no checkpoints and no pages.
ARCHIVED, MOST_BYTES = (".log", ".json", ".jsonl", ".done"), 8 << 20
TRIAL = "trial.json"  # of a sweep, in the folder of its run: how it ended


@dataclass(frozen=True)
class Measurement:
    """A command, how long it may take, and which folder it needs."""

    name: str
    command: str
    limit_s: int
    needs: str = ""  # "cifar10", "imagenette", "photos" or "before": the folder takes the place of {folder}
    has_rows: bool = True


def sweep(name: str, limit_s: int, needs: str) -> Measurement:
    """A sweep of this folder, by the name of its file."""
    command = f"sweep experiments/{name}.toml --set data.path={{folder}} --out {{out}}/{name}"
    return Measurement(name, command, limit_s, needs, has_rows=False)


CONVNEXT, VIT = "timm:convnext_tiny", "timm:vit_small_patch16_224"
# What is still to be shown comes first.
MEASUREMENTS = (
    Measurement("tests", f"make GPU_PYTHON={shlex.quote(sys.executable)} test-gpu", 570, has_rows=False),
    Measurement("ddp-4", "bench step --against ddp --ranks 4 --batch 512 --rounds 3 --round-s 1", 570),
    Measurement("chaos-2", "bench chaos --backend nccl --ranks 2 --faults 25 --seed 601", 540),
    Measurement("chaos-4", "bench chaos --backend nccl --ranks 4 --faults 25 --seed 602", 540),
    Measurement("timm-step-convnext", f"bench step --against timm --model {CONVNEXT} --rounds 6", 540),
    Measurement("timm-step-vit", f"bench step --against timm --model {VIT} --rounds 6", 540),
    Measurement(
        "timm-train-convnext",
        f"bench train --data {{folder}} --model {CONVNEXT} --epochs 5 --no-compile",
        540,
        "imagenette",
    ),
    Measurement(
        "timm-train-vit", f"bench train --data {{folder}} --model {VIT} --epochs 5 --no-compile", 400, "imagenette"
    ),
    sweep("cifar10-screen", 560, "cifar10"),
    sweep("cifar10-recipe", 1800, "cifar10"),
    sweep("imagenette-recipe", 1100, "imagenette"),
    sweep("imagenette-ladder", 1100, "imagenette"),
    sweep("cifar10-to-94", 120, "cifar10"),
    sweep("cifar10-to-95", 180, "cifar10"),
    sweep("halp", 400, "cifar10"),
    Measurement(
        "before",
        "bench step --against torchvision --model resnet50 --batch 256,32 --peers none --rounds 8 --before {folder}",
        180,
        "before",
    ),
    Measurement("one-gpu", "bench step --against torchvision --model resnet50 --batch 256 --rounds 8", 540),
    Measurement("ddp-2", "bench step --against ddp --ranks 2 --batch 64 --rounds 7 --round-s 0.4", 480),
    Measurement("overlap", "bench overlap --rounds 6", 180),
    Measurement("optimizer", "bench optimizer", 180),
    Measurement("kernels", "bench kernels --no-compile", 240),
    Measurement("input", "bench input {folder} --train resnet50 --batch 256 --seconds 60", 300, "photos"),
    Measurement("instruments", "bench instruments --model resnet50 --batch 64 --image-size 224", 180),
)


def build_command(one: Measurement, out: Path, folder: str) -> str:
    """What is typed for it; the rows go to OUT."""
    command = one.command if one.command.startswith("make") else f"{LOCKSTEP} {one.command}"
    rows = f" --json {shlex.quote(str(out / one.name))}.json" if one.has_rows else ""
    return command.replace("{folder}", shlex.quote(folder)).replace("{out}", shlex.quote(str(out))) + rows


def measure(one: Measurement, out: Path, folder: str, left_s: float) -> str:
    """Run it, and say how it ended."""
    done = out / f"{one.name}.done"
    if done.exists():
        return "was done before"
    limit_s = min(one.limit_s, left_s - END_S)
    if limit_s < 1:
        return "no time left"
    begun = time.monotonic()
    with (out / f"{one.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", build_command(one, out, folder)],
            cwd=ROOT,
            env={**os.environ, **VARIABLES},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group that can be ended as a whole
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"cut off after {limit_s:.0f} s"
        finally:
            end(process)
    took = f"after {time.monotonic() - begun:.0f} s"
    if process.returncode == 0:
        done.touch()
        return f"done {took}"
    return f"failed {took}, with {process.returncode}"


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command that still runs, with all that it has started: first so that it writes what it has."""
    if process.poll() is None:
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)


def list_archived(out: Path) -> Iterator[Path]:
    """What came out. Of a sweep's runs those that are over, without config.toml: their data may lie elsewhere next."""
    for place, folders, files in os.walk(out):
        if "config.toml" in files and not is_over(Path(place)):
            folders.clear()
            continue
        folders[:] = sorted(set(folders) - {"checkpoints"})
        for file in (Path(place, name) for name in sorted(files)):
            if file.suffix in ARCHIVED and file.stat().st_size <= MOST_BYTES:
                yield file


def is_over(run: Path) -> bool:
    """Whether a run is a trial that a sweep would not take again."""
    with suppress(OSError, ValueError, KeyError):
        return bool(json.loads((run / TRIAL).read_text())["status"] in ("finished", "diverged"))
    return False


def write_archive(out: Path, archive: Path) -> None:
    """The whole file or none."""
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as packed:
        for file in list_archived(out):
            packed.add(file, file.relative_to(out))
    part.replace(archive)


def take_up(archive: Path, out: Path) -> None:
    """Put what an archive holds where it came from; what is there already is newer."""
    if not archive.exists():
        return
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                if not (out / member.name).exists():
                    packed.extract(member, out, filter="data")
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        sys.exit(f"{archive} cannot be taken up ({error}); name another --archive.")


def choose(only: str) -> Sequence[Measurement]:
    """Those that are named, in the order they are named; all if none is."""
    names = {one.name: one for one in MEASUREMENTS}
    wanted = [name.strip() for name in only.split(",") if name.strip()] or list(names)
    if unknown := [name for name in wanted if name not in names]:
        sys.exit(f"There is no measurement {unknown[0]}; choose from {', '.join(names)}.")
    return [names[name] for name in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a list of GPU measurements.")
    parser.add_argument("out", type=Path, help="where logs and rows go")
    parser.add_argument("--only", default="", help="names, with commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that all of them may take")
    parser.add_argument("--archive", type=Path, help="what is taken up at the start, and written after each")
    parser.add_argument("--show", action="store_true", help="list the commands, run nothing")
    for name in ("cifar10", "imagenette", "photos", "before"):
        parser.add_argument(f"--{name}", default="", help="its folder")
    asked = parser.parse_args()
    out, over = asked.out.resolve(), time.monotonic() + asked.seconds
    out.mkdir(parents=True, exist_ok=True)
    if asked.archive and not asked.show:
        take_up(asked.archive, out)
        asked.archive.parent.mkdir(parents=True, exist_ok=True)
        write_archive(out, asked.archive)  # that it can be written shows before minutes of measuring
    for one in choose(asked.only):
        folder = getattr(asked, one.needs) if one.needs else ""
        if one.needs and not folder:
            print(f"{one.name}: left out; name its folder with --{one.needs}", flush=True)
            continue
        folder = str(Path(folder).resolve())
        if asked.show:
            print(f"{one.name}, {one.limit_s} s at most: {build_command(one, out, folder)}", flush=True)
            continue
        print(f"{one.name}: {measure(one, out, folder, over - time.monotonic())}", flush=True)
        if asked.archive:
            write_archive(out, asked.archive)


if __name__ == "__main__":
    main()
