"""The plan of a run: what was chosen, what the alternatives cost, and whether the promise was kept."""

import statistics
from collections.abc import Mapping
from typing import Any

from lockstep.events import StepDone
from lockstep.report.history import History, find_input, find_plan, number
from lockstep.report.page.document import Section, escape, tell
from lockstep.report.phrases import describe_measuring, describe_ranks, explain_slower, plural

MOST_TRIALS = 24
CHOSEN = ' class="chosen" aria-label="chosen"'


def tell_plan(history: History) -> Section | None:
    """What was chosen, what the alternatives cost, and whether the promise was kept."""
    plan, chosen_input = find_plan(history), find_input(history)
    if plan is None and chosen_input is None:
        return None
    sentences, tables = [], ""
    if plan is not None:
        how = f"{plan.execution}; gradients in {plan.reduction}" if plan.reduction else plan.execution
        where = describe_ranks(plan.topology, plan.backend)
        since = describe_measuring(plan.source, plan.seconds) if plan.source in ("measured", "remembered") else ""
        how = how[:1].upper() + how[1:]
        sentences.append(f"{how} ({f'{since} ' if since else ''}{where}).")
        trials = [read for trial in plan.trials if (read := _read_trial(trial))]
        timed = sorted((trial for trial in trials if trial["seconds"]), key=lambda trial: trial["seconds"])
        if len({trial["execution"] for trial in timed}) == 1:  # no need to say it in every line
            timed = [{**trial, "name": trial["travel"] or trial["name"]} for trial in timed]
        if timed:
            tables = _build_trials(history, timed[:MOST_TRIALS], plan.batch)
        failed = [trial for trial in trials if not trial["seconds"]]
        if failed:
            rows = "".join(f"<li>{escape(trial['name'])}: {escape(trial['failure'])}</li>" for trial in failed)
            tables += f"<h3>Left out</h3><ul>{rows}</ul>"
    if chosen_input is not None:
        sentences.append(chosen_input.text)
    body = "".join(f"<p>{tell(sentence)}</p>" for sentence in sentences[1:]) + tables
    return Section("plan", "The plan", lead=sentences[0], body=body, short="Plan")


def _read_trial(trial: object) -> dict[str, Any] | None:
    if not isinstance(trial, dict):
        return None
    words = {key: str(trial.get(key) or "") for key in ("execution", "rule", "reduction", "failure")}
    travel = f"{words['rule']}: {words['reduction']}" if words["reduction"] else ""
    seconds = number(trial.get("seconds"))
    return {
        "name": "; ".join(filter(None, (words["execution"], travel))),
        "travel": travel,
        "execution": words["execution"],
        "rule": words["rule"],
        "seconds": seconds if seconds and seconds > 0 and not words["failure"] else None,
        "failure": words["failure"],
        "chosen": trial.get("chosen") is True,
    }


def _build_trials(history: History, trials: list[dict[str, Any]], batch: int) -> str:
    """A bar for each candidate, the chosen one in colour, and a line where the run's own steps were."""
    chosen = next((trial for trial in trials if trial["chosen"]), None)
    middle = None if history.is_predicted else _measure_step(history)
    longest = max([trial["seconds"] for trial in trials] + ([middle] if middle else [])) * 1.04
    bars = "".join(_build_bar(trial, longest, middle, batch) for trial in trials)
    says = _say_trials(trials, chosen, middle, history.is_predicted)
    return f'<h3>Milliseconds a step, by candidate</h3><p>{tell(says)}</p><ol class="bars">{bars}</ol>'


def _build_bar(trial: Mapping[str, Any], longest: float, middle: float | None, batch: int) -> str:
    seconds, chosen = trial["seconds"], trial["chosen"]
    line = f'<i class="measured" style="left:{100 * middle / longest:.2f}%"></i>' if middle else ""
    return (
        f'<li{CHOSEN if chosen else ""}><span class="name">{escape(trial["name"])}</span>'
        f'<span class="value">{seconds * 1e3:,.2f} ms<small>{batch / seconds:,.0f} images/s a rank</small></span>'
        f'<span class="track" aria-hidden="true"><b style="width:{100 * seconds / longest:.2f}%"></b>{line}</span></li>'
    )


def _say_trials(
    trials: list[dict[str, Any]], chosen: Mapping[str, Any] | None, middle: float | None, is_predicted: bool
) -> str:
    simulated = f"{'was' if len(trials) == 1 else 'were'} simulated"
    says = f"{plural(len(trials), 'candidate')} {simulated if is_predicted else 'took whole steps in turns'}."
    if chosen:
        says += f" The chosen one {'would take' if is_predicted else 'promised'} {chosen['seconds'] * 1e3:,.2f} ms."
        says += f" {explained}" if (explained := explain_slower(trials, mark="")) else ""
    if middle:
        # By how much, and why, is told where the mean is compared with what was predicted.
        says += f" The run's own steps took {middle * 1e3:,.2f} ms, the median of its records (dashed line)."
    return says


def _measure_step(history: History) -> float | None:
    """What a step took in the last part, the median of its records."""
    steps = [step.step_s for step in history.parts[-1] if isinstance(step, StepDone) and (number(step.step_s) or 0) > 0]
    return statistics.median(steps) if steps else None
