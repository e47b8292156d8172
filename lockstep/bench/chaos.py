"""Runs that are killed, stopped and starved on purpose, and whether anything is lost by it.

Real ranks train a small network. Each run meets some faults (`faults.py`), is resumed whenever it has ended before its
time, and in the end is compared with a run that met none: every epoch's ledger, the weights to the last bit, processes
and files left behind, tracebacks, and whether anything hung. How long it took until a fault was noticed, and until
training went on, is measured on the way.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lockstep.bench.faults import LAUNCHER, Fault, plan_faults
from lockstep.bench.results import check_files, write_rows
from lockstep.errors import LockstepError
from lockstep.events import EpochDone, Event, StepDone, read_events

SETTINGS = (
    "data.train_images=520",
    "data.val_images=100",
    "data.image_size=32",
    "data.eval_resize=36",
    "model.width=8",
    "optim.warmup=0st",
    "train.global_batch=26",
    "train.duration=4ep",
    "train.eval_every=1ep",
    "train.checkpoint_every=8st",
    "train.log_every=1",
    # Measured, so that there is a phase of it, but with one outcome: weights can be compared to the last bit.
    "comm.tune_s=1",
    "comm.algorithm=flat",
    "comm.fusion=threshold",
    "comm.overlap=on",
)
TIMEOUT_S = 6.0  # comm.timeout_s of the runs
GRACE_S = 15.0  # beyond the timeout, nothing may take longer to end
FAULTS_A_RUN = 4
MARKER = "LOCKSTEP_CHAOS"
POLL_S = 0.02
PAUSE_S = 1.5  # of a stopped rank that is woken again, of an interpreter that is held
DISK_MB = 24
KNOWN_FILES = {
    "config.toml",
    "plan.toml",
    "profile.json",
    "events.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    ".lock",
}

# Loaded by Python in every process of a run: holds the interpreter when a file of its rank's name appears.
HOLD = """
import os, threading
def watch(folder, name):
    import ctypes, time
    path = os.path.join(folder, name)
    while True:
        time.sleep(0.05)
        try:
            seconds = int(open(path).read() or 0)
            os.unlink(path)
        except (OSError, ValueError):
            continue
        ctypes.PyDLL(None).usleep(seconds)
if os.environ.get("RANK") and os.environ.get("LOCKSTEP_CHAOS_HOLD"):
    threading.Thread(target=watch, args=(os.environ["LOCKSTEP_CHAOS_HOLD"], os.environ["RANK"]), daemon=True).start()
"""


@dataclass(frozen=True)
class Row:
    """One fault and what came of it."""

    fault: int
    run: int
    kind: str
    victim: str
    phase: str
    step: int  # reported when it struck
    came: bool  # False where the run had ended before its moment came
    ended: bool  # whether it ended the run's part
    status: int | None  # with which exit status
    detection_s: float | None  # from the fault to the end of the run's part
    recovery_s: float | None  # from the start of the next part to its first step
    hung: bool


@dataclass
class Verdict:
    """What was wrong with a run in the end; nothing if all is well."""

    run: int
    problems: list[str] = field(default_factory=list)


@dataclass
class Part:
    """A started program, until it ends."""

    process: "subprocess.Popen[str]"
    begun_s: float
    num_events: int  # that the log had before

    def kill(self, marker: str) -> None:
        """End everything."""
        for pid in [self.process.pid, *find_processes(marker)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Run:
    """One run in a folder of its own, started and resumed until it is finished."""

    def __init__(self, number: int, folder: Path, num_ranks: int, cache: Path) -> None:
        self.number = number
        self.folder = folder / f"run-{number:04d}"
        self.num_ranks = num_ranks
        self.marker = f"{os.getpid()}-{number}"
        self.hold = folder / f"hold-{number}"
        self.hold.mkdir(parents=True)
        self._site = folder / "site"
        self._cache = cache
        self.output = ""
        self.num_hung = 0

    def start(self) -> Part:
        """Start the program, or have it go on if it has begun; one killed before it left a word is started again."""
        resume = (self.folder / "config.toml").is_file()
        settings = [f"--set={setting}" for setting in (*SETTINGS, f"comm.timeout_s={TIMEOUT_S:g}")]
        target = [str(self.folder), "--resume"] if resume else ["quickstart", f"--out={self.folder}", *settings]
        environment = os.environ | {
            MARKER: self.marker,
            "LOCKSTEP_CHAOS_HOLD": str(self.hold),
            "LOCKSTEP_CACHE": str(self._cache),
            "PYTHONPATH": os.pathsep.join([str(self._site), str(Path(__file__).parents[2])]),
        }
        begun, num_events = time.monotonic(), len(self.events())
        process = subprocess.Popen(
            [sys.executable, "-m", "lockstep", "train", *target, f"--ranks={self.num_ranks}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        return Part(process, begun, num_events)

    def events(self) -> list[Event]:
        """What the run has said so far."""
        path = self.folder / "events.jsonl"
        with contextlib.suppress(LockstepError):
            return read_events(path)
        return []

    def finish(self, part: Part, limit_s: float) -> int | None:
        """The exit status; None, and an end by force, if it does not come in time."""
        try:
            out, _ = part.process.communicate(timeout=max(0.1, limit_s))
        except subprocess.TimeoutExpired:
            part.kill(self.marker)
            out, _ = part.process.communicate()
            self.output += out
            self.num_hung += 1
            return None
        self.output += out
        return part.process.returncode

    @property
    def last_step(self) -> int:
        return max((event.step for event in self.events() if isinstance(event, StepDone)), default=0)


def run(*, count: int, seed: int, num_ranks: int, json_file: Path | None, console: Console) -> bool:
    """Inject so many faults; True if nothing was lost, hung or left behind."""
    check_files(json_file, None)
    with tempfile.TemporaryDirectory(prefix="lockstep-chaos-") as name, disk(Path(name) / "disk") as (folder, limited):
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(HOLD)
        cache = Path(name) / "cache"
        reference = Run(0, folder, num_ranks, cache)
        console.print("A run without faults, to compare with.", highlight=False)
        if reference.finish(reference.start(), 300) != 0:
            raise LockstepError(f"Even a run without faults fails: {reference.output.strip().splitlines()[-1:]}")
        expected = digest_weights(reference.folder)
        faults = plan_faults(count, seed, num_ranks, with_disks=limited)
        rows: list[Row] = []
        verdicts: list[Verdict] = []
        while len(rows) < count:
            one = Run(len(verdicts) + 1, folder, num_ranks, cache)
            met = torment(one, faults[len(rows) : len(rows) + FAULTS_A_RUN], folder)
            rows += met
            verdicts.append(judge(one, expected))
            _say(met, verdicts[-1], len(rows), count, console)
            shutil.rmtree(one.folder, ignore_errors=True)
            if json_file is not None:
                write_rows(json_file, [asdict(row) for row in rows] + [asdict(verdict) for verdict in verdicts])
    console.print(build_table(rows))
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    hung = sum(row.hung for row in rows)
    console.print(
        f"{len(rows)} faults in {len(verdicts)} runs, seed {seed}: {hung} hangs, {len(problems)} problems.",
        highlight=False,
    )
    return not problems and not hung


def torment(one: Run, faults: Sequence[Fault], folder: Path) -> list[Row]:
    """Let a run meet its faults, and finish."""
    rows: list[Row] = []
    part = one.start()
    for fault in faults:
        is_due = wait_for_moment(one, part, fault)
        step, struck = one.last_step, time.monotonic()
        came = is_due and strike(fault, one, part, folder)
        may_go_on = not came or fault.kind in ("SIGSTOP, SIGCONT", "held interpreter")
        status: int | None = None
        is_over = not may_go_on or _ends_soon(part, 1.0)
        hung = False
        recovery = None
        if is_over:
            status = one.finish(part, TIMEOUT_S + GRACE_S)
            hung = status is None
        detection = time.monotonic() - struck if is_over else None
        mend(fault, one, folder)
        if is_over and not _is_finished(one):
            part = one.start()
            recovery = _time_first_step(one, part)
        row = Row(
            fault=fault.number,
            run=one.number,
            kind=fault.kind,
            victim=fault.victim,
            phase=fault.phase,
            step=step,
            came=came,
            ended=is_over,
            status=status,
            detection_s=detection if came else None,
            recovery_s=recovery,
            hung=hung,
        )
        rows.append(row)
        if _is_finished(one):
            break
    _finish(one, part)
    return rows


def _finish(one: Run, part: Part) -> None:
    """Let what is left of a run come to its end, resumed as often as a fault's late effect makes it necessary."""
    for _ in range(3):
        one.finish(part, 120)
        if _is_finished(one):
            return
        part = one.start()
    part.kill(one.marker)
    one.finish(part, 1)


def _is_finished(one: Run) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return bool(json.loads((one.folder / "summary.json").read_text())["status"] == "finished")
    return False


def _ends_soon(part: Part, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if part.process.poll() is not None:
            return True
        time.sleep(POLL_S)
    return False


def _time_first_step(one: Run, part: Part) -> float | None:
    """Seconds from the start of a part to its first step; None if it ends before."""
    end = time.monotonic() + 60
    while time.monotonic() < end and part.process.poll() is None:
        if any(isinstance(event, StepDone) for event in one.events()[part.num_events :]):
            return time.monotonic() - part.begun_s
        time.sleep(POLL_S)
    return None


def wait_for_moment(one: Run, part: Part, fault: Fault) -> bool:
    """Return when a fault is due; False if the part has ended before."""
    while part.process.poll() is None:
        if fault.moment == "start" and (fault.target == LAUNCHER or find_rank(one.marker, fault.target)):
            break
        if any(event.kind == fault.moment for event in one.events()[part.num_events :]):
            break
        time.sleep(POLL_S)
    time.sleep(fault.delay_s)
    return part.process.poll() is None


def strike(fault: Fault, one: Run, part: Part, folder: Path) -> bool:
    """Do it; False if its victim is gone already."""
    pid = part.process.pid if fault.target == LAUNCHER else find_rank(one.marker, fault.target)
    if pid is None:
        return False
    if fault.kind == "full disk":
        _fill(folder)
    elif fault.kind == "read-only disk":
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=False, capture_output=True)
    elif fault.kind == "held interpreter":
        (one.hold / str(fault.target)).write_text(str(int(PAUSE_S * 1e6)))
    else:
        name, _, more = fault.kind.partition(",")
        number = signal.Signals[name.removesuffix(" twice")]
        _send(pid, number)
        if name.endswith("twice"):
            time.sleep(0.2)
            _send(pid, number)
        if more:
            time.sleep(PAUSE_S)
            _send(pid, signal.SIGCONT)
    return True


def mend(fault: Fault, one: Run, folder: Path) -> None:
    """Give back what a fault took from everybody."""
    if fault.kind == "full disk":
        (folder / "filler").unlink(missing_ok=True)
    elif fault.kind == "read-only disk":
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=False, capture_output=True)


def _fill(folder: Path) -> None:
    """Leave no byte free."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def judge(one: Run, expected: str) -> Verdict:
    """What is wrong with a finished run."""
    verdict = Verdict(one.number)
    epochs = [event for event in one.events() if isinstance(event, EpochDone)]
    if not _is_finished(one):
        verdict.problems.append(f"run {one.number} did not finish: {one.output.strip().splitlines()[-3:]}")
    elif digest_weights(one.folder) != expected:
        verdict.problems.append(f"run {one.number} ended with other weights than the run without faults")
    if not all(event.ledger_ok for event in epochs):
        verdict.problems.append(f"run {one.number} lost or doubled samples")
    if not epochs:
        verdict.problems.append(f"run {one.number} certified no epoch")
    if one.num_hung:
        verdict.problems.append(f"run {one.number} hung {one.num_hung} times")
    if "Traceback" in one.output:
        verdict.problems.append(f"run {one.number} printed a traceback")
    left = wait_until_gone(one.marker)
    if left:
        verdict.problems.append(f"run {one.number} left {len(left)} processes behind")
    files = {path.name for path in one.folder.iterdir()} if one.folder.is_dir() else set()
    if strange := sorted(files - KNOWN_FILES):
        verdict.problems.append(f"run {one.number} left {', '.join(strange)} behind")
    return verdict


def digest_weights(folder: Path) -> str:
    """One hash over all arrays of the newest checkpoint."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    digest = hashlib.sha256()
    for name in ("model.safetensors", "optimizer.safetensors"):
        digest.update((newest / name).read_bytes())
    return digest.hexdigest()


def find_processes(marker: str) -> list[int]:
    """Processes that were started, however indirectly, with this marker in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = f"{MARKER}={marker}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if is_ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(int(folder.name))
    return found


def find_rank(marker: str, rank: int) -> int | None:
    """The process of a rank; None while there is none."""
    for pid in find_processes(marker):
        with contextlib.suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def wait_until_gone(marker: str, seconds: float = 5.0) -> list[int]:
    """Processes of a run that are still there after a while; they are ended."""
    end = time.monotonic() + seconds
    while (left := find_processes(marker)) and time.monotonic() < end:
        time.sleep(POLL_S)
    for pid in left:
        _send(pid, signal.SIGKILL)
    return left


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A folder for runs, on a small disk of its own where this user may mount one; whether it is."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    is_limited = subprocess.run(["mount", *options], check=False, capture_output=True).returncode == 0
    try:
        yield folder, is_limited
    finally:
        if is_limited:
            subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def _say(rows: Sequence[Row], verdict: Verdict, done: int, count: int, console: Console) -> None:
    met = ", ".join(f"{row.kind} to {row.victim} in {row.phase}" for row in rows)
    console.print(f"{done}/{count}: {met}", highlight=False, soft_wrap=True)
    for problem in verdict.problems:
        console.print(f"  problem: {problem}", highlight=False, soft_wrap=True, markup=False)


def build_table(rows: Sequence[Row]) -> Table:
    """A line for each kind of fault."""
    table = Table(box=None, header_style="bold")
    for column in ("fault", "came", "ended a part", "hung", "noticed after", "went on after"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind in [*dict.fromkeys(row.kind for row in rows), None]:
        own = [row for row in rows if kind in (row.kind, None)]
        table.add_row(
            kind or "all",
            str(sum(row.came for row in own)),
            str(sum(row.ended for row in own)),
            str(sum(row.hung for row in own)),
            _describe([row.detection_s for row in own]),
            _describe([row.recovery_s for row in own]),
        )
    table.caption = "Median, and the longest, in seconds; went on: from the restart to its first step."
    return table


def _describe(values: Sequence[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):.1f} ({max(found):.1f})" if found else ""
