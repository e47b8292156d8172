"""A list of GPU measurements, one after the other: python experiments/measure_gpu.py OUT [options]

Each is a command of this repository with a limit of time. OUT gets what it printed (NAME.log) and, where it writes
rows, NAME.json. One that has ended well is not run again, so that the same command goes on where it was stopped.
`--only` picks by name, `--seconds` bounds the whole, `--show` only lists. CIFAR-10, Imagenette, photographs and
an older checkout are named by their folders; what needs one that is not named is left out.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKSTEP = f"{shlex.quote(sys.executable)} -m lockstep"


@dataclass(frozen=True)
class Measurement:
    """A command, how long it may take, and which folder it needs."""

    name: str
    command: str
    limit_s: int
    needs: str = ""  # "cifar10", "imagenette", "photos" or "before": the folder takes the place of {folder}
    has_rows: bool = True


MEASUREMENTS = (
    Measurement("tests", f"make GPU_PYTHON={shlex.quote(sys.executable)} test-gpu", 570, has_rows=False),
    Measurement(
        "before",
        "bench step --against torchvision --model resnet50 --batch 256,32 --peers none --rounds 8 --before {folder}",
        180,
        "before",
    ),
    Measurement("one-gpu", "bench step --against torchvision --model resnet50 --batch 256 --rounds 8", 540),
    Measurement("optimizer", "bench optimizer", 180),
    Measurement("kernels", "bench kernels --no-compile", 240),
    Measurement("input", "bench input {folder} --train resnet50 --batch 256 --seconds 60", 300, "photos"),
    Measurement("ddp-2", "bench step --against ddp --ranks 2 --batch 64 --rounds 7 --round-s 0.4", 480),
    Measurement("ddp-4", "bench step --against ddp --ranks 4 --batch 512 --rounds 3 --round-s 1", 590),
    Measurement("overlap", "bench overlap --rounds 6", 180),
    Measurement("instruments", "bench instruments --model resnet50 --batch 64 --image-size 224", 180),
    Measurement("chaos-2", "bench chaos --backend nccl --ranks 2 --faults 25 --seed 601", 540),
    Measurement("chaos-4", "bench chaos --backend nccl --ranks 4 --faults 25 --seed 602", 540),
    Measurement("timm-step", "bench step --against timm --rounds 6", 540),
    Measurement("timm-train", "bench train --data {folder} --epochs 5 --no-compile", 540, "imagenette"),
    Measurement(
        "halp", "sweep experiments/halp.toml --set data.path={folder} --out {out}/halp", 480, "cifar10", has_rows=False
    ),
    Measurement(
        "cifar10-screen",
        "sweep experiments/cifar10-screen.toml --set data.path={folder} --out {out}/cifar10-screen",
        600,
        "cifar10",
        has_rows=False,
    ),
    Measurement(
        "imagenette-recipe",
        "sweep experiments/imagenette-recipe.toml --set data.path={folder} --out {out}/imagenette-recipe",
        900,
        "imagenette",
        has_rows=False,
    ),
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
    limit_s = min(one.limit_s, left_s)
    if limit_s < 1:  # 0 would be no limit
        return "no time left"
    begun = time.monotonic()
    with (out / f"{one.name}.log").open("wb") as log:
        command = ["timeout", "--signal=INT", "--kill-after=20", f"{limit_s:.0f}", "bash", "-c"]
        ended = subprocess.run(
            [*command, build_command(one, out, folder)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    took = f"after {time.monotonic() - begun:.0f} s"
    if ended.returncode == 0:
        done.touch()
        return f"done {took}"
    return f"cut off {took}" if ended.returncode in (124, 137) else f"failed {took}, with {ended.returncode}"


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
    parser.add_argument("--show", action="store_true", help="list the commands, run nothing")
    for name in ("cifar10", "imagenette", "photos", "before"):
        parser.add_argument(f"--{name}", default="", help="its folder")
    asked = parser.parse_args()
    out, end = asked.out.resolve(), time.monotonic() + asked.seconds
    out.mkdir(parents=True, exist_ok=True)
    for one in choose(asked.only):
        folder = getattr(asked, one.needs) if one.needs else ""
        if one.needs and not folder:
            print(f"{one.name}: left out; name its folder with --{one.needs}", flush=True)
        elif asked.show:
            print(f"{one.name}: {build_command(one, out, str(Path(folder).resolve()))}", flush=True)
        else:
            print(f"{one.name}: {measure(one, out, str(Path(folder).resolve()), end - time.monotonic())}", flush=True)


if __name__ == "__main__":
    main()
