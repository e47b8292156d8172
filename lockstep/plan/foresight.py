"""What the planner expects of this very run, before its first step: its own measurements -> a record. Torch-free.

A plan for a foreign cluster starts from a device profile and from links (`search.py`). A run has better: what its own
ranks measured before step 0, now or once. The step is put together from them as it is for a cluster, by `graph.py` and
`simulate.py`; what nobody measured comes from a shipped profile, the links of a cluster file or a guess, and says so.
After the last step `hindsight.py` sets what was measured beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lockstep.comm.cost import Choice, predict_seconds
from lockstep.comm.topology import Topology
from lockstep.events import RunPredicted
from lockstep.plan.choose import expect_seconds, has_links, pick_trial
from lockstep.plan.collectives import Phase
from lockstep.plan.device import BatchTime, DeviceProfile
from lockstep.plan.graph import StepCosts, expect_slowest
from lockstep.plan.plan import Plan
from lockstep.plan.profile import Profile, StepTime
from lockstep.plan.rules import UNPLANNED, find_rule
from lockstep.plan.search import list_ready
from lockstep.plan.shared_cores import FAIR, Cores, Sum, share_cores
from lockstep.plan.shipped import list_shipped, read_shipped
from lockstep.plan.simulate import simulate
from lockstep.plan.workload import PREFETCH

JITTER = 0.01  # relative standard deviation of a rank's computing time, where ranks were not compared: as in presets
# Where a number comes from.
NOW, ONCE, SHIPPED, DERIVED, LINKS, GUESS = (
    "measured before step 0",
    "measured once, remembered",
    "a shipped profile",
    "a derived profile",
    "the links of the cluster file",
    "a guess",
)


@dataclass(frozen=True)
class Facts:
    """What is known of a run before its first step."""

    plan: Plan
    profile: Profile
    source: Literal["measured", "remembered", "default"]  # of the profile
    topology: Topology
    wire_bytes: int  # of an element on its way
    on_gpu: bool
    global_batch: int
    num_images: int  # of an epoch
    steps: int  # still to take
    passes: int = 1  # of a step, those at an anchor among them
    anchors: int = 0  # passes over the epoch still to take for full gradients
    cores: int = 1  # of one rank
    device: DeviceProfile | None = None  # of this model on such a device, if any fits
    rule: str = "sgd"  # that updates the weights
    decodes_photos: bool = False  # in every epoch, as a device profile's input does


@dataclass(frozen=True)
class Alone:
    """The step of a rank that waits for nobody: all ranks' mean, every pass of it together."""

    forward_s: float
    backward_s: float
    update_s: float
    passes: int  # of which only the last sends anything
    row: BatchTime | StepTime  # with the moments at which gradients are ready
    scale: float  # from the row to here
    slowdown: float  # of the slowest rank
    has_parts: bool  # whether forward and update are known apart
    source: str
    slowest_source: str

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


def foresee(facts: Facts) -> RunPredicted | None:
    """The record of what is expected; None where nothing was measured and no profile fits."""
    alone = _time_alone(facts)
    if alone is None:
        return None
    num_ranks = facts.topology.num_ranks
    # The last batch of an epoch may be smaller, and takes the less.
    steps_per_epoch = -(-facts.num_images // facts.global_batch)
    fill = facts.num_images / (steps_per_epoch * facts.global_batch)
    sizes = [
        min(facts.wire_bytes, buffer.element_bytes) * (buffer.end - buffer.start)
        for buffer in facts.plan.reduction.buffers
    ]
    sums_s, sums_source = _time_messages(facts, sizes)
    costs = _build_costs(facts, alone, sums_s, fill)
    rate, rate_source = _find_rate(facts)
    parts = simulate(_add_input(facts, costs, rate, fill)).parts
    steps_s = facts.steps * parts.step_s
    anchors_s = 0.0
    if facts.anchors:
        anchor_batch_s = simulate(_add_input(facts, _leave_iterate_out(costs), rate, fill)).parts.step_s
        anchors_s = facts.anchors * steps_per_epoch * anchor_batch_s
    trained = steps_s / (steps_s + anchors_s) if anchors_s else 1.0  # of the time: T and S count as `Account` does
    compute_s = parts.forward_s + parts.backward_s + parts.update_s
    images = facts.global_batch * fill
    sources = {"computing": alone.source, "input": rate_source}
    if num_ranks > 1:
        sources |= {"messages": sums_source, "slowest": alone.slowest_source}
    memory = _expect_memory(facts)
    if memory is not None and facts.device is not None:
        sources["memory"] = _name_profile(facts.device)
    assumptions = _list_assumptions(facts, fill, rate)
    return RunPredicted(
        steps=facts.steps,
        images=images,
        world_size=num_ranks,
        input_s=parts.input_s,
        forward_s=parts.forward_s if alone.has_parts else None,
        backward_s=parts.backward_s if alone.has_parts else None,
        update_s=parts.update_s if alone.has_parts else None,
        compute_s=compute_s,
        slowest_s=parts.slowest_s,
        communicate_s=parts.communicate_s,
        step_s=parts.step_s,
        messages_s=costs.comm_s,
        images_per_second=trained * images / parts.step_s,
        speed_one_rank=trained * images / num_ranks / compute_s,
        efficiency=compute_s / parts.step_s,
        train_s=steps_s + anchors_s,
        trial_s=_find_trial(facts),
        input_rate=rate,
        memory_bytes=memory,
        sources=sources,
        assumptions=assumptions,
    )


def find_device(profile: Profile, model: str) -> DeviceProfile | None:
    """The shipped profile of this model on such a device, with images and numbers as here; None where there is none."""
    setup = profile.setup
    words = set(setup.device.lower().replace("-", " ").split())
    for device, shipped in list_shipped():
        if shipped == model and device in words:
            found = read_shipped(device, model)
            if (found.image_size, found.precision) == (setup.image_size, setup.precision):
                return found
    return None


def _time_alone(facts: Facts) -> Alone | None:
    step = next((step for step in facts.profile.steps if step.execution == facts.plan.execution), None)
    if step is not None and step.step_s > 0:
        return _time_measured(facts, step)
    # A profile's steps are of another rule, and such a one's differ in more than the update.
    return _time_profiled(facts, facts.device) if facts.device and facts.rule not in UNPLANNED else None


def _time_measured(facts: Facts, step: StepTime) -> Alone:
    """From the rehearsal of the chosen execution; a rank alone has also tried whole steps of it, several in a row."""
    num_ranks = facts.topology.num_ranks
    mean_s = step.mean_s or step.step_s
    tried_s = _find_trial(facts)
    scale = (tried_s if num_ranks == 1 and tried_s else mean_s) / step.step_s
    has_parts = step.forward_s > 0
    # Where they are not known apart, all but the last backward pass counts as one forward pass.
    backward_s = step.step_s - step.forward_s - step.update_s if has_parts else step.backward_s
    source = NOW if facts.source == "measured" else ONCE
    return Alone(
        forward_s=(step.step_s - backward_s - step.update_s) * scale,
        backward_s=backward_s * scale,
        update_s=step.update_s * scale,
        passes=facts.passes if has_parts else 1,
        row=step,
        scale=scale,
        slowdown=step.slowest_s / mean_s - 1 if step.slowest_s else expect_slowest(num_ranks, JITTER),
        has_parts=has_parts,
        source=source,
        slowest_source=source if step.slowest_s else GUESS,
    )


def _time_profiled(facts: Facts, device: DeviceProfile) -> Alone | None:
    """From a device profile, in the way that the run executes its step."""
    if facts.plan.execution not in device.executions:
        return None
    passes = facts.passes
    row = device.at(-(-facts.profile.setup.batch // passes), facts.plan.execution)
    return Alone(
        forward_s=passes * row.forward_s,
        backward_s=passes * row.backward_s,
        update_s=row.update_s,
        passes=passes,
        row=row,
        scale=1.0,
        slowdown=expect_slowest(facts.topology.num_ranks, JITTER),
        has_parts=True,
        source=_name_profile(device),
        slowest_source=GUESS,
    )


def _name_profile(device: DeviceProfile) -> str:
    return SHIPPED if device.source == "measured" else DERIVED


def _time_messages(facts: Facts, sizes: Sequence[int]) -> tuple[list[float], str]:
    """Seconds of each buffer's all-reduce: as measured, or else by the links."""
    reduction, messages = facts.plan.reduction, facts.profile.messages
    if facts.topology.num_ranks == 1:
        return [], ""
    measured = {timing.choice for timing in messages}

    def expect(choice: Choice, size: int) -> float:
        if choice in measured:
            return expect_seconds(messages, choice, size)
        return predict_seconds(choice, size, facts.topology)

    seconds = [expect(choice, size) for choice, size in zip(reduction.choices, sizes, strict=True)]
    if measured >= set(reduction.choices):
        return seconds, NOW if facts.source == "measured" else ONCE
    return seconds, LINKS if has_links(facts.topology) else GUESS


def _build_costs(facts: Facts, alone: Alone, sums_s: Sequence[float], fill: float) -> StepCosts:
    """What a step costs; on a CPU messages and computing want the same cores, all of which compute already."""
    reduction, share = facts.plan.reduction, fill / alone.passes
    costs = StepCosts(alone.forward_s * share, alone.backward_s * share, alone.update_s, passes=alone.passes)
    if sums_s:
        ready_s = list_ready(alone.row, reduction, alone.scale * fill)
        full_s = [min(ready, costs.backward_s) for ready in ready_s]  # which may end a little before its last gradient
        if facts.on_gpu:
            messages = tuple((Phase("inter", seconds),) for seconds in sums_s)
            costs = replace(costs, ready_s=tuple(full_s), messages=messages, overlap=reduction.overlap)
        else:
            sums = [Sum(full, seconds, 1.0) for full, seconds in zip(full_s, sums_s, strict=True)]
            costs = share_cores(costs, sums, Cores(1, 1), overlap=reduction.overlap)
    return replace(costs, passes=alone.passes, slowdown=alone.slowdown)


def _add_input(facts: Facts, costs: StepCosts, rate: float | None, fill: float) -> StepCosts:
    """The same with a batch to be made, where it is known how long that takes."""
    if rate is None:
        return costs
    decode_s = facts.profile.setup.batch * fill / rate
    costs = replace(costs, decode_s=decode_s, prefetch=facts.plan.input.prefetch_batches or PREFETCH)
    if facts.on_gpu:
        return costs
    # Decoded beside the first pass, which begins when there is room for another batch.
    taken_s = FAIR * decode_s * min(1.0, facts.plan.input.threads / facts.cores)
    return replace(costs, forward_s=costs.forward_s + taken_s / costs.passes)


def _leave_iterate_out(costs: StepCosts) -> StepCosts:
    """A batch of an anchor's pass: a step with half of its passes."""
    if costs.passes > 1:
        return replace(costs, passes=costs.passes // 2)
    # Not known apart, all but the last backward pass counts as forward.
    return replace(costs, forward_s=max(0.0, (costs.forward_s - costs.backward_s) / 2))


def _find_rate(facts: Facts) -> tuple[float | None, str]:
    """Images a second that one rank's input makes: as an earlier part of the run found out, or by a device profile."""
    known = facts.profile.input
    if known is not None and known.images_per_second > 0:
        return known.images_per_second, "an earlier part of this run"
    plan, device = facts.plan.input, facts.device
    if device and device.input and facts.decodes_photos:
        by_threads = plan.threads * device.input.images_per_core_s if plan.decoder != "nvjpeg" else 0.0
        by_device = device.input.device_images_s if plan.decoder != "cpu" else 0.0
        if by_threads + by_device > 0:
            return by_threads + by_device, _name_profile(device)
    return None, GUESS


def _find_trial(facts: Facts) -> float | None:
    """Seconds of a whole step as the chosen candidate took them in its trial."""
    best = pick_trial(facts.profile.trials)
    return best.seconds if best is not None and best.execution == facts.plan.execution and best.seconds > 0 else None


def _expect_memory(facts: Facts) -> int | None:
    device = facts.device
    if device is None or facts.plan.execution not in device.executions or facts.rule in UNPLANNED:
        return None
    row = device.at(-(-facts.profile.setup.batch // facts.passes), facts.plan.execution)
    width = 2 if any(slot.num_bytes < 4 * slot.elements for slot in row.slots) else 4
    known, asked = find_rule(device.rule), find_rule(facts.rule)
    elements = sum(slot.elements for slot in row.slots)
    return max(0, round(row.memory_bytes + (asked.state_bytes(width) - known.state_bytes(width)) * elements))


def _list_assumptions(facts: Facts, fill: float, rate: float | None) -> list[str]:
    """What the numbers rest on besides measurements, in words."""
    found = []
    if rate is None:
        found.append("batches are there before a step asks for them")
    if not facts.on_gpu:
        taken = "nothing" if rate is None else "half of the cores they work on"
        found.append(f"decode threads take {taken} from computing")
    if facts.topology.num_ranks > 1 and facts.plan.reduction.overlap:
        taken = "nothing" if facts.on_gpu else "half of the cores"
        found.append(f"messages under the backward pass take {taken} from it")
    if fill < 1:
        found.append(f"batches hold {100 * fill:.3g} % of the global batch on average, and computing takes the less")
    return found
