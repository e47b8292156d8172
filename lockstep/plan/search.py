"""Recipe × cluster × devices -> a prediction: the best reduction found as the trainer finds it, its step simulated.

`propose_reductions` cuts and assigns as in a run, from messages priced by `price.py` in place of measured ones, and
`pick_trial` picks from simulated steps in place of trials. Torch-free and pure: well under a second for any size.
"""

import math
from dataclasses import dataclass, replace

from lockstep.comm.cost import GROUPED, Choice, Timing
from lockstep.comm.fusion import ReductionPlan
from lockstep.errors import LockstepError
from lockstep.layout import Layout, ParameterSpec, plan_layout
from lockstep.plan.advice import Outlook, advise
from lockstep.plan.choose import PLAIN, expect_seconds, pick_trial, propose_reductions
from lockstep.plan.cluster import Cluster, Shape, place_devices
from lockstep.plan.collectives import Phase, is_regular
from lockstep.plan.device import BatchTime, DeviceProfile
from lockstep.plan.graph import StepCosts, expect_slowest
from lockstep.plan.plan import describe_reduction
from lockstep.plan.prediction import InputNeed, Prediction, Reduction, Scaling
from lockstep.plan.price import expect_timings, list_planned_choices, name_choice, price, price_sharded
from lockstep.plan.profile import StepTime, Trial
from lockstep.plan.rules import find_rule
from lockstep.plan.simulate import Simulation, simulate
from lockstep.plan.workload import IMAGES_PER_CORE_S, Workload, compare_precision

PIXEL_BYTES = 3  # of a decoded image on its way to the device


@dataclass(frozen=True)
class Case:
    """One recipe on so many devices, before anything is searched: what the search and the advice both start from."""

    workload: Workload
    profile: DeviceProfile
    cluster: Cluster
    shape: Shape
    scaling: Scaling
    global_batch: int
    sharded: bool = False
    choices: tuple[Choice, ...] = ()  # all-reduces to choose from; none: all that there are
    messages: tuple[Timing, ...] = ()  # measured ones, in place of those that links promise

    @property
    def batch(self) -> int:
        """Samples of a rank's largest share."""
        return -(-self.global_batch // self.shape.num_devices)

    @property
    def passes(self) -> int:
        return -(-self.batch // self.workload.max_batch)


@dataclass(frozen=True)
class Found:
    """The best way that was found, and its step."""

    rule: str
    reduction: ReductionPlan
    costs: StepCosts
    simulation: Simulation
    trials: tuple[Trial, ...]  # simulated ones


def build_case(
    workload: Workload,
    profile: DeviceProfile,
    cluster: Cluster,
    devices: int,
    batch_per_device: int = 0,
    *,
    sharded: bool = False,
) -> Case:
    """Strong scaling, or weak with a batch for each device; what cannot run is a sentence."""
    shape = place_devices(cluster, devices)
    if batch_per_device:
        case = Case(workload, profile, cluster, shape, "weak", batch_per_device * devices, sharded)
    else:
        case = Case(workload, profile, cluster, shape, "strong", workload.global_batch, sharded)
    if devices > case.global_batch:
        raise LockstepError(
            f"train.global_batch = {case.global_batch:,} cannot be shared by {devices:,} devices; give at least one "
            "sample to each."
        )
    needed, row = measure_memory(case)
    while needed > profile.memory_bytes and workload.halves and workload.max_batch > 1:
        workload = replace(workload, max_batch=-(-workload.max_batch // 2))
        case = replace(case, workload=workload)
        needed, row = measure_memory(case)
    if needed > profile.memory_bytes:
        raise LockstepError(
            f"A pass of {row.batch:,} images of {profile.model} needs {needed / 1e9:.3g} GB, and {profile.device} has "
            f"{profile.memory_bytes / 1e9:.3g} GB; {_suggest_passes(case)}"
        )
    return case


def _suggest_passes(case: Case) -> str:
    low, high = 0, case.workload.max_batch
    while high - low > 1:
        middle = (low + high) // 2
        smaller = replace(case, workload=replace(case.workload, max_batch=middle))
        low, high = (middle, high) if measure_memory(smaller)[0] <= case.profile.memory_bytes else (low, middle)
    return f"set train.max_batch_per_rank = {low}." if low else "no batch of it fits."


def measure_memory(case: Case) -> tuple[int, BatchTime]:
    """Bytes that a device needs, and the row of its profile they come from."""
    row = time_pass(case)
    width = _width(row)
    elements = sum(slot.elements for slot in row.slots)
    known, asked = find_rule(case.profile.rule), find_rule(case.workload.rule)
    state = asked.state_bytes(width) / (case.shape.per_node if case.sharded else 1) - known.state_bytes(width)
    return max(0, round(row.memory_bytes + state * elements)), row


def time_pass(case: Case) -> BatchTime:
    """One forward and backward pass, and an update, of the largest share's part."""
    return _time_batch(case, -(-case.batch // case.passes))


def _time_batch(case: Case, batch: int) -> BatchTime:
    row = case.profile.at(batch)
    area = (case.workload.image_size / case.profile.image_size) ** 2
    if area == 1:
        return row
    return replace(
        row,
        forward_s=row.forward_s * area,
        backward_s=row.backward_s * area,
        step_s=row.update_s + (row.step_s - row.update_s) * area,
        memory_bytes=round(row.memory_bytes * area),
        slots=tuple(replace(slot, ready_s=slot.ready_s * area) for slot in row.slots),
    )


def _width(row: BatchTime) -> int:
    return 2 if any(slot.num_bytes < 4 * slot.elements for slot in row.slots) else 4


def build_profile_layout(row: BatchTime) -> Layout:
    """The layout of the network that a profile is of."""
    return plan_layout(
        ParameterSpec(slot.name, (slot.elements,), True, True, half=slot.num_bytes < 4 * slot.elements)
        for slot in reversed(row.slots)
    )


def plan_reductions(case: Case) -> dict[str, ReductionPlan]:
    """The reductions that a run would try there, by the trainer's own functions."""
    row = time_pass(case)
    layout = build_profile_layout(row)
    messages = case.messages or expect_timings(_list_choices(case), layout.gradient_bytes, case.shape)
    ready_s = [slot.ready_s for slot in row.slots]
    return propose_reductions(case.workload.comm, layout, ready_s, messages, _wire_bytes(case))


def _list_choices(case: Case) -> list[Choice]:
    comm = case.workload.comm
    if comm.algorithm == "auto" and case.choices:
        return [choice for choice in case.choices if is_regular(choice, case.shape)]
    if comm.algorithm == "auto":
        return list_planned_choices(case.shape)
    return [Choice(comm.algorithm, (comm.group_size or case.shape.per_node) if comm.algorithm in GROUPED else 1)]


def _wire_bytes(case: Case) -> int:
    return 4 if case.workload.comm.wire == "fp32" else 2


def build_costs(case: Case, reduction: ReductionPlan) -> StepCosts:
    """What one step costs there with this reduction."""
    row, shape = time_pass(case), case.shape
    width, elements = _width(row), sum(slot.elements for slot in row.slots)
    # What a measured step takes beyond its parts, such as gaps between kernels, counts as forward.
    told_s = row.forward_s + row.backward_s + row.update_s
    scale = min(1.0, row.step_s / told_s) if told_s else 1.0
    rest_s = max(0.0, row.step_s - told_s)
    known, asked = find_rule(case.profile.rule), find_rule(case.workload.rule)
    update_s = row.update_s * asked.moved_bytes(width) / known.moved_bytes(width)
    sizes = [min(_wire_bytes(case), buffer.element_bytes) * (buffer.end - buffer.start) for buffer in reduction.buffers]
    ready_s = list_ready(row, reduction, scale)
    messages: tuple[tuple[Phase, ...], ...] = ()
    gather: tuple[Phase, ...] = ()
    if shape.num_devices == 1:
        ready_s = ()
    elif case.sharded:
        update_s /= shape.per_node
        messages = tuple(price_sharded(size, 0.0, shape, has_ratios=False)[0] for size in sizes)
        gather = price_sharded(0.0, width * elements, shape, has_ratios=asked.has_ratios)[1]
    else:
        pairs = zip(reduction.choices, sizes, strict=True)
        messages = tuple(price_message(case, choice, size) for choice, size in pairs)
    return StepCosts(
        forward_s=row.forward_s * scale + rest_s,
        backward_s=row.backward_s * scale,
        update_s=update_s * scale,
        ready_s=ready_s,
        messages=messages,
        overlap=reduction.overlap,
        passes=case.passes,
        gather=gather,
        launch_s=row.launch_s * case.passes,
        prefetch=case.workload.prefetch,
        slowdown=expect_slowest(shape.num_devices, shape.machine.jitter),
        **_input_costs(case),
    )


def price_message(case: Case, choice: Choice, num_bytes: int) -> tuple[Phase, ...]:
    """The phases of one all-reduce: as measured where messages were, else by the links."""
    if not case.messages:
        return price(choice, num_bytes, case.shape)
    level = "inter" if case.shape.num_nodes > 1 else "intra"
    return (Phase(level, expect_seconds(case.messages, choice, num_bytes)),)


def list_ready(row: BatchTime | StepTime, reduction: ReductionPlan, scale: float = 1.0) -> tuple[float, ...]:
    """When each buffer may go: buffers leave in order, the last of their gradients decides."""
    ready, at = [], 0.0
    for buffer in reduction.buffers:
        at = max([at, *(slot.ready_s for slot in row.slots[buffer.first : buffer.last])])
        ready.append(min(at, row.backward_s) * scale)
    return tuple(ready)


def _input_costs(case: Case) -> dict[str, float]:
    """Seconds of one device's batch in each stage of the input, its node's cores and disks shared with the others."""
    workload, machine, facts = case.workload, case.shape.machine, case.profile.input
    if not workload.image_bytes:
        return {}
    images = case.batch * case.shape.per_node
    per_core = facts.images_per_core_s if facts else IMAGES_PER_CORE_S
    decoded = per_core * (machine.cores_per_node or 0) + (facts.device_images_s if facts else 0.0) * case.shape.per_node
    image_bytes = facts.image_bytes if facts else workload.image_bytes
    copied = PIXEL_BYTES * workload.image_size**2 * case.batch
    return {
        "read_s": images * image_bytes / machine.storage_bytes_per_s if machine.storage_bytes_per_s else 0.0,
        "decode_s": images / decoded if machine.cores_per_node else 0.0,
        "copy_s": copied / facts.copy_bytes_s if facts and facts.copy_bytes_s else 0.0,
    }


def search(case: Case) -> Found:
    """The quickest reduction there is, PyTorch's own unless it is clearly slower, as in a run."""
    execution, trials = time_pass(case).execution, []
    tried: dict[str, tuple[ReductionPlan, StepCosts, Simulation]] = {}
    for rule, reduction in plan_reductions(case).items():
        costs = build_costs(case, reduction)
        simulation = simulate(costs)
        tried[rule] = reduction, costs, simulation
        trials.append(Trial(execution, rule, describe_reduction(reduction), simulation.step_s))
    best = pick_trial(trials)
    assert best is not None
    return Found(best.rule, *tried[best.rule], tuple(trials))


def predict(case: Case, found: Found | None = None) -> Prediction:
    """Everything there is to say of one size."""
    found = found or search(case)
    workload, profile, shape, machine = case.workload, case.profile, case.shape, case.shape.machine
    parts, devices = found.simulation.parts, shape.num_devices
    row = time_pass(case)
    rate = case.global_batch / parts.step_s
    speed = case.global_batch / devices / found.costs.compute_s
    train_s = workload.epochs * workload.num_images / rate
    notes = [*workload.notes, *compare_precision(workload, profile)]
    if row.extrapolated:
        notes.append(f"{row.batch} images a pass lie outside the profile's batches: extrapolated")
    if case.scaling == "weak" and case.global_batch != workload.global_batch:
        notes.append(f"the epochs are the recipe's for a global batch of {workload.global_batch:,}")
    outlook = _look_around(case, found)
    binds, advice = advise(outlook)
    hours = train_s / 3600 * devices
    return Prediction(
        recipe=workload.recipe,
        model=workload.model,
        cluster=case.cluster.name,
        device=profile.device,
        profile=f"{profile.source}: {profile.note}" if profile.note else profile.source,
        scaling=case.scaling,
        devices=devices,
        nodes=shape.num_nodes,
        global_batch=case.global_batch,
        batch_per_device=case.batch,
        passes=case.passes,
        execution=str(row.execution),
        step_s=parts.step_s,
        parts=parts,
        comm_s=found.costs.comm_s,
        images_per_second=rate,
        speed_one_rank=speed,
        efficiency=rate / (speed * devices),
        efficiency_whole=min(1.0, rate / devices / outlook.best_rate),
        epochs=workload.epochs,
        steps=max(1, round(workload.epochs * math.ceil(workload.num_images / case.global_batch))),  # as a run counts
        train_s=train_s,
        dollars=None if machine.dollars_per_device_hour is None else hours * machine.dollars_per_device_hour,
        energy_j=None if machine.watts_per_device is None else hours * 3600 * machine.watts_per_device,
        memory_bytes=measure_memory(case)[0],
        memory_limit_bytes=profile.memory_bytes,
        input=_need_input(case, rate),
        reduction=_describe(case, found),
        binds=binds,
        advice=advice,
        notes=tuple(notes),
    )


def _need_input(case: Case, rate: float) -> InputNeed | None:
    workload, machine, facts = case.workload, case.shape.machine, case.profile.input
    if not workload.image_bytes:
        return None
    node_rate = rate / case.shape.num_nodes
    by_devices = facts.device_images_s * case.shape.per_node if facts else 0.0
    return InputNeed(
        images_per_second=node_rate,
        decode_cores=max(0.0, node_rate - by_devices) / (facts.images_per_core_s if facts else IMAGES_PER_CORE_S),
        storage_bytes_per_s=node_rate * (facts.image_bytes if facts else workload.image_bytes),
        cores=machine.cores_per_node,
        storage_limit_bytes_per_s=machine.storage_bytes_per_s,
    )


def _describe(case: Case, found: Found) -> Reduction:
    if case.shape.num_devices == 1:
        return Reduction("", (), (), False, "nothing to send")
    sizes = tuple(buffer.num_bytes for buffer in found.reduction.buffers)
    if case.sharded:
        names: tuple[str, ...] = ("reduce-scatter and all-gather",) * len(sizes)
    else:
        pairs = zip(found.reduction.choices, sizes, strict=True)
        names = tuple(name_choice(choice, size, case.shape) for choice, size in pairs)
    text = describe_reduction(found.reduction)
    rule = "threshold" if found.rule == PLAIN else found.rule
    return Reduction(rule, sizes, names, found.reduction.overlap, text)


def _look_around(case: Case, found: Found) -> Outlook:
    """The step as it is and as it would be with one thing changed, which is what advice is made of."""
    shape = case.shape

    def change(**changes: object) -> float:
        changed = replace(case, **changes)  # type: ignore[arg-type]
        return simulate(build_costs(changed, found.reduction)).step_s

    wider = replace(shape, inter=replace(shape.inter, bytes_per_s=2 * shape.inter.bytes_per_s))
    wider_inside = replace(shape, intra=replace(shape.intra, bytes_per_s=2 * shape.intra.bytes_per_s))
    larger = replace(case, global_batch=2 * case.global_batch)
    batches = {-(-case.batch // case.passes), *(row.batch for row in case.profile.batches)}
    best_rate = max(batch / _time_batch(case, batch).step_s for batch in batches)
    return Outlook(
        parts=found.simulation.parts,
        costs=found.costs,
        shape=shape,
        batch=case.batch,
        global_batch=case.global_batch,
        device=case.profile.device,
        best_rate=best_rate,
        pass_rate=-(-case.batch // case.passes) / time_pass(case).step_s,
        wider_s=change(shape=wider) if shape.num_nodes > 1 else change(shape=wider_inside),
        larger_rate=larger.global_batch / simulate(build_costs(larger, found.reduction)).step_s,
        need=_need_input(case, case.global_batch / max(1e-12, _without_input(found))),
    )


def _without_input(found: Found) -> float:
    return found.simulation.parts.step_s - found.simulation.parts.input_s
