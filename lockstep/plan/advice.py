"""What binds, and what to change, in one sentence with numbers: each of them from a step simulated anew. Torch-free."""

from dataclasses import dataclass

from lockstep.plan.cluster import Shape
from lockstep.plan.graph import StepCosts
from lockstep.plan.prediction import Binding, InputNeed
from lockstep.plan.simulate import StepParts

NEGLIGIBLE = 0.03  # of a step: what costs less binds nothing


@dataclass(frozen=True)
class Outlook:
    """A step, and what it would be if one thing were otherwise."""

    parts: StepParts
    costs: StepCosts
    shape: Shape
    batch: int
    global_batch: int
    device: str
    best_rate: float  # images per second of one device at its best batch
    pass_rate: float  # and at this one
    wider_s: float  # the step with links twice as wide
    larger_rate: float  # images per second of all with twice the global batch
    need: InputNeed | None  # if the input held nothing up


def advise(outlook: Outlook) -> tuple[Binding, str]:
    """What takes most of what a step loses, and what would win it back."""
    parts, step_s = outlook.parts, outlook.parts.step_s
    passes_s = parts.forward_s + parts.backward_s
    losses: dict[Binding, float] = {
        "input": parts.input_s,
        "communication": parts.communicate_s,
        "the slowest rank": parts.slowest_s,
        "launching": parts.launch_s,
        "the update": parts.update_s,
        "small batches": max(0.0, passes_s * (1 - outlook.pass_rate / outlook.best_rate)),
    }
    binds = max(losses, key=losses.__getitem__)
    if losses[binds] < NEGLIGIBLE * step_s:
        binds = "arithmetic"
    of = f"{_ms(losses.get(binds, passes_s))} of {_ms(step_s)} ms"
    rate = outlook.global_batch / step_s
    match binds:
        case "input":
            text = _advise_input(outlook, of)
        case "communication":
            level = "between nodes" if outlook.shape.num_nodes > 1 else "inside the node"
            text = (
                f"Communication binds: {of} are messages that nothing hides; links {level} twice as wide would make a "
                f"step {_ms(outlook.wider_s)} ms, twice the global batch {outlook.larger_rate / rate:.2f} × the "
                "images per second."
            )
        case "small batches" if outlook.costs.passes > 1:
            text = (
                f"Small passes bind: {outlook.costs.passes:,} in a step, each at {outlook.pass_rate:,.0f} images/s "
                f"where {outlook.device} can do {outlook.best_rate:,.0f}, which costs {of}; raise "
                "train.max_batch_per_rank."
            )
        case "small batches":
            text = (
                f"Small batches bind: at {outlook.batch:,} image{'s' * (outlook.batch > 1)} {outlook.device} computes "
                f"{outlook.pass_rate:,.0f} images/s, at its best {outlook.best_rate:,.0f}, which costs {of}; twice the "
                f"global batch would give {outlook.larger_rate / rate:.2f} × the images per second."
            )
        case "the slowest rank":
            text = (
                f"Waiting for the slowest of {outlook.shape.num_devices:,} ranks binds: {of}, if their times vary by "
                f"{100 * outlook.shape.machine.jitter:.3g} %; steadier clocks, or fewer devices with more images each, "
                "would save it."
            )
        case "launching":
            text = f"Launching binds: the host holds the device up for {of}; record the step (train.cuda_graph)."
        case "the update":
            text = f"The update binds: {of}; shard it over the devices of a node, or give each more images."
        case _:
            text = (
                f"Arithmetic binds: {of} are forward and backward at {outlook.pass_rate / outlook.best_rate:.0%} of "
                f"{outlook.device}'s best rate; more devices, or quicker ones, are what helps."
            )
    return binds, text


def _ms(seconds: float) -> str:
    """Milliseconds to three digits, never as a power of ten."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _advise_input(outlook: Outlook, of: str) -> str:
    need = outlook.need
    if need is None:
        return f"Input binds: the device waits {of} for it."
    slow = max(
        ("read", outlook.costs.read_s),
        ("decode", outlook.costs.decode_s),
        ("copy", outlook.costs.copy_s),
        key=lambda pair: pair[1],
    )[0]
    if slow == "decode":
        return (
            f"Input binds: the device waits {of}; a node would need {need.decode_cores:,.0f} cores to decode, and has "
            f"{need.cores}: decode on the GPU, or pack images that are smaller (lockstep data pack --short-side)."
        )
    if slow == "read":
        limit = need.storage_limit_bytes_per_s or 0.0
        return (
            f"Input binds: the device waits {of}; a node would have to read {need.storage_bytes_per_s / 1e9:.3g} GB/s, "
            f"and its storage gives {limit / 1e9:.3g}: pack images that are smaller, or keep them in memory."
        )
    return f"Input binds: the device waits {of} for copies from the host."
