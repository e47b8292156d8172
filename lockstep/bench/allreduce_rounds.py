"""Which calls `allreduce.py` times, how often and in which order: everybody's noise is everybody else's too."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.cost import Choice
from lockstep.comm.world import World
from lockstep.errors import LockstepError

MIN_ROUNDS = 3  # of each half, when time is short
TURN_S = 0.05  # calls are repeated within a turn until the quickest takes this long: ranks do not start all at once

Run = Callable[[Tensor], object]
Runs = dict[Choice, Run]
Say = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """What is measured at one size, after one call each of everything."""

    size: int
    screened: dict[Choice, float]
    kept: list[Choice]
    repeats: int  # calls in a turn
    rounds: int


def screen(runs: Runs, tensor: Tensor, world: World) -> dict[Choice, float]:
    """The seconds of one call each, after one whose sum is checked: there is no point in timing a wrong one."""
    seconds = torch.zeros(len(runs), dtype=torch.float64)
    for index, (choice, run) in enumerate(runs.items()):
        tensor.fill_(world.rank + 1)
        run(tensor)
        if not bool((tensor == world.size * (world.size + 1) // 2).all()):
            raise LockstepError(f"{choice} summed {tensor.numel()} elements wrongly; please report it.")
        tensor.zero_()  # stays zero however often it is summed
        seconds[index] = _time_turn(run, tensor, 1, world)
    return dict(zip(runs, world.maximum(seconds).tolist(), strict=True))


def plan_rounds(screened: dict[int, dict[Choice, float]], rounds: int, budget_s: float) -> list[Plan]:
    """What to measure at each size; short messages take less than their share, and leave the rest to the long ones."""
    plans: list[Plan] = []
    for size, seconds in screened.items():
        share_s = budget_s / (len(screened) - len(plans))
        kept = keep_best(seconds, 2)
        round_s = sum(seconds[choice] for choice in kept)
        repeats = max(1, int(min(50, TURN_S / min(seconds.values()), share_s / round_s / (2 * MIN_ROUNDS))))
        half = min(rounds // 2, max(MIN_ROUNDS, int(share_s / round_s / repeats / 2)))
        plans.append(Plan(size, seconds, kept, repeats, 2 * half))
        budget_s -= 2 * half * repeats * round_s
    return plans


def keep_best(seconds: dict[Choice, float], count: int) -> list[Choice]:
    """Each algorithm with its `count` best group sizes."""
    kept: list[Choice] = []
    for algorithm in dict.fromkeys(choice.algorithm for choice in seconds):
        mine = [choice for choice in seconds if choice.algorithm == algorithm]
        kept += sorted(mine, key=seconds.__getitem__)[:count]
    return kept


def list_turns(plans: Sequence[Plan]) -> list[tuple[Plan, int]]:
    """All rounds of all sizes, each size's spread over the whole time.

    So a few bad seconds of the machine spoil a round or two of every size, and not all rounds of one.
    """
    turns = [(plan, number) for plan in plans for number in range(plan.rounds)]
    return sorted(turns, key=lambda turn: ((turn[1] + 0.5) / turn[0].rounds, turn[0].size))


def take_turns(
    plans: Sequence[Plan], runs: Runs, array: Tensor, world: World, say: Say
) -> dict[int, dict[Choice, list[float]]]:
    """Seconds a call by size and choice, for each round; the slowest rank's time counts, and all ranks learn it."""
    seconds = {plan.size: torch.zeros(plan.rounds, len(plan.kept), dtype=torch.float64) for plan in plans}
    turns = list_turns(plans)
    start, said = time.perf_counter(), 0
    for done, (plan, number) in enumerate(turns, start=1):
        # In another order each round, the same on all ranks, so that nobody always follows the same one.
        for index in random.Random(number).sample(range(len(plan.kept)), len(plan.kept)):
            run, tensor = runs[plan.kept[index]], array[: plan.size // 4]
            seconds[plan.size][number, index] = _time_turn(run, tensor, plan.repeats, world)
        if (tenth := 10 * done // len(turns)) > said:
            said = tenth
            say(f"{10 * tenth} % measured after {time.perf_counter() - start:.0f} s")
    return {
        plan.size: dict(zip(plan.kept, world.maximum(seconds[plan.size]).T.tolist(), strict=True)) for plan in plans
    }


def _time_turn(run: Run, tensor: Tensor, repeats: int, world: World) -> float:
    """Seconds a call on this rank, from all ranks ready."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        run(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
