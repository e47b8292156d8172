"""A profile for people, as `lockstep tune` prints it: what it is true of, what was chosen, what it cost. Torch-free."""

from collections.abc import Sequence
from typing import Literal

from rich.table import Table

from lockstep.comm.cost import Choice, Timing
from lockstep.events import PlanChosen
from lockstep.plan.choose import explain_choice, pick_trial
from lockstep.plan.plan import Execution
from lockstep.plan.profile import Profile, Setup
from lockstep.report.phrases import describe_plan, size


def describe_setup(setup: Setup) -> list[str]:
    """Where and for what it was measured."""
    where = f"{setup.topology}{f' over {setup.backend}' if setup.backend else ''}, {setup.device}"
    return [
        f"[bold]{where}[/bold]",
        f"{setup.model}; {setup.precision}, {setup.batch:,} images of {setup.image_size} pixels a rank; {setup.pins}",
        f"links: {setup.links or 'not given'}",
        setup.versions,
    ]


def describe_choice(profile: Profile, source: Literal["measured", "remembered"]) -> list[str]:
    """What was chosen, in the words of a run that follows it, and what the alternatives cost."""
    best, setup = pick_trial(profile.trials), profile.setup
    return describe_plan(
        PlanChosen(
            source=source,
            seconds=profile.seconds,
            topology=setup.topology,
            backend=setup.backend,
            batch=setup.batch,
            execution=str(best.execution if best else Execution()),  # where all failed, the plain step remains
            reduction=best.reduction if best else "",
            plan={},
            trials=explain_choice(profile.trials),
        )
    )


def build_message_table(messages: Sequence[Timing]) -> Table:
    """Milliseconds of each all-reduce over message sizes, the best of each size marked."""
    choices = list(dict.fromkeys(timing.choice for timing in messages))
    measured = {(timing.num_bytes, timing.choice): timing.seconds for timing in messages}
    table = Table(box=None, header_style="bold")
    table.add_column("bytes", justify="right")
    for choice in choices:
        table.add_column(str(choice), justify="right")
    for num_bytes in sorted({timing.num_bytes for timing in messages}):
        row = {choice: measured[num_bytes, choice] for choice in choices if (num_bytes, choice) in measured}
        best = min(row, key=row.__getitem__)
        cells = [
            f"{row[choice] * 1e3:.2f}{' *' if choice == best else '  '}" if choice in row else "-  "
            for choice in choices
        ]
        table.add_row(size(num_bytes), *cells)
    return table


def describe_fits(profile: Profile) -> list[str]:
    """The cost of each all-reduce as a formula, and how well it holds; of two sizes a formula says nothing."""
    sizes: dict[Choice, set[int]] = {}
    for timing in profile.messages:
        sizes.setdefault(timing.choice, set()).add(timing.num_bytes)
    return [
        f"  {choice}: about {fit.latency_s * 1e3:.2f} ms + {fit.seconds_per_byte * 1e9:.2f} ms/MB for long ones; "
        f"from 256 KiB the fit is off by {100 * fit.median_error:.0f} %, at most {100 * fit.max_error:.0f} %"
        for choice, fit in profile.fits.items()
        if len(sizes.get(choice, ())) > 2
    ]
