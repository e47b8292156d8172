"""Whether a run that met faults ended as one that met none: samples, weights, hangs, leftovers, words."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lockstep.bench.chaos.find import wait_until_gone
from lockstep.bench.chaos.report import Row, Verdict
from lockstep.bench.chaos.runs import Run
from lockstep.bench.chaos.surroundings import Surroundings
from lockstep.events import EpochDone

KNOWN_FILES = {
    "config.toml",
    "plan.toml",
    "profile.json",
    "events.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    ".lock",
    ".identity",
}
# What a process says that did not end by a sentence.
CRIES = ("Traceback (most recent call last)", "terminate called", "Fatal Python error", "Exception ignored")
# Temporary files of torchrun's agent and of torch's compiler: nobody else knows where they lie.
TOLERATED = ("torchelastic_", "torchinductor_")
# Faults that may cost a run some of its records.
LOSING = ("full disk", "read-only disk")


@dataclass(frozen=True)
class Reference:
    """What a run without faults came to."""

    weights: str
    ledgers: dict[int, str]  # by epoch


def take_reference(run: Run) -> Reference:
    """What is to be compared with."""
    return Reference(digest_weights(run.folder), _read_ledgers(run))


def judge(run: Run, reference: Reference, before: Surroundings, rows: list[Row], *, to_the_bit: bool = True) -> Verdict:
    """What is wrong with a finished run, which met these faults; weights are compared to the bit where that holds."""
    problems = list(run.problems)
    other_weights = run.is_finished and digest_weights(run.folder) != reference.weights
    if not run.is_finished:
        problems.append(f"did not finish: {run.last_words}")
    elif other_weights and to_the_bit:
        problems.append("ended with other weights than the run without faults")
    problems += _judge_ledgers(run, reference, may_miss=any(row.kind in LOSING for row in rows))
    if run.num_hung:
        problems.append(f"hung {run.num_hung} times")
    problems += [f"printed: {cry}" for cry in CRIES if cry in run.output]
    if left := wait_until_gone(run.marker):
        problems.append(f"left {len(left)} processes behind")
    if run.cluster is not None:
        run.cluster.close()
    left_behind = [*_list_strange(run.folder), *_list_temporary(run.temporary), *before.list_new()]
    if left_behind:
        problems.append(f"left {', '.join(left_behind)} behind")
    return Verdict(run.number, [f"run {run.number} ({run.way}): {problem}" for problem in problems], other_weights)


def _judge_ledgers(run: Run, reference: Reference, *, may_miss: bool) -> list[str]:
    """Every epoch was certified, each time with every sample exactly once."""
    epochs = [event for event in run.events() if isinstance(event, EpochDone)]
    problems = []
    if not all(event.ledger_ok and event.ledger == reference.ledgers.get(event.epoch) for event in epochs):
        problems.append("lost or doubled samples")
    missing = sorted(reference.ledgers.keys() - {event.epoch for event in epochs})
    if missing and not may_miss:
        problems.append(f"did not certify epochs {missing}")
    return problems


def _read_ledgers(run: Run) -> dict[int, str]:
    return {event.epoch: event.ledger for event in run.events() if isinstance(event, EpochDone)}


def _list_strange(folder: Path) -> list[str]:
    """Files in a run's folder that no run is meant to leave."""
    files = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    aside = folder.glob("checkpoints/.*")
    return sorted(files - KNOWN_FILES) + sorted(path.name for path in aside)


def _list_temporary(folder: Path) -> list[str]:
    """Temporary files that outlived the run."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(TOLERATED))


def digest_weights(folder: Path) -> str:
    """One hash over all arrays of the newest checkpoint; that of nothing if there is none."""
    digest = hashlib.sha256()
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    if not checkpoints:
        return digest.hexdigest()
    newest = checkpoints[-1]
    for name in ("model.safetensors", "optimizer.safetensors", "statistics.safetensors"):
        digest.update((newest / name).read_bytes())
    return digest.hexdigest()
