"""Which assumption of a prediction was most wrong, and by how much: one sentence. Torch-free."""

from lockstep.events import InputChosen, RunPredicted
from lockstep.plan.foresight import GUESS, NOW
from lockstep.plan.measured_steps import PASSES, Measured, finite, is_time

TOLERANCE = 0.1  # of a step: what is off by less is as predicted


def name_assumption(predicted: RunPredicted, measured: Measured, made: InputChosen | None) -> str:
    """What a step took against what it should have, and the assumption that was most wrong."""
    ratio = measured.step_s / predicted.step_s
    head = f"A step took {_ms(measured.step_s)}, {ratio:.2f} times the {_ms(predicted.step_s)} that were predicted"
    off = {
        "input": measured.input_s - predicted.input_s,
        "computing": measured.compute_s - predicted.compute_s,
    }
    if predicted.world_size > 1 and measured.slowest_s is None:
        off["messages"] = measured.wait_s - predicted.slowest_s - predicted.communicate_s
    elif predicted.world_size > 1 and measured.slowest_s is not None:
        off["slowest"] = measured.slowest_s - predicted.slowest_s
        off["messages"] = measured.wait_s - measured.slowest_s - predicted.communicate_s
    worst = max(off, key=lambda part: abs(off[part]))
    if abs(off[worst]) <= TOLERANCE * predicted.step_s:
        return f"{head}: no part of it was off by more than {100 * TOLERANCE:.0f} % of a step."
    says = {"input": _say_input, "computing": _say_computing, "slowest": _say_slowest, "messages": _say_messages}
    return f"{head}: {says[worst](predicted, measured, made)}."


def name_source(predicted: RunPredicted, part: str) -> str:
    """Where the number of a part comes from, in words."""
    source = predicted.sources.get(part)
    return source[:80] if isinstance(source, str) else ""


def _say_input(predicted: RunPredicted, measured: Measured, made: InputChosen | None) -> str:
    waited = f"steps waited {_ms(measured.input_s)} for it"
    rate = finite(made.images_per_second) if made else None
    makes = f", which makes {rate:,.0f} images/s a rank" if rate else ""
    if predicted.input_rate is None:
        return f"input was assumed never to be waited for, and {waited}{makes}"
    source = name_source(predicted, "input") or GUESS
    return (
        f"input was taken to make {predicted.input_rate:,.0f} images/s a rank ({source}) and to be waited for "
        f"{_ms(predicted.input_s)}, and {waited}{makes}"
    )


def _say_computing(predicted: RunPredicted, measured: Measured, made: InputChosen | None) -> str:
    source = name_source(predicted, "computing") or GUESS
    than = "was measured before step 0" if source == NOW else f"was known of it ({source})"
    times = measured.compute_s / predicted.compute_s
    off = {
        name: measured.passes[name] - told
        for name in PASSES
        if (told := getattr(predicted, f"{name}_s")) is not None and name in measured.passes
    }
    where = ""
    if off:
        most = max(off, key=lambda name: abs(off[name]))
        word = f"the {most} pass" if most != "update" else "the update"
        where = f", most of the difference in {word}"
    rate = finite(made.images_per_second) if made and measured.on_cpu else None
    beside = ""
    if rate and times > 1:
        busy_s = predicted.images / predicted.world_size / rate
        beside = f"; decoding keeps threads on the same cores busy for {_ms(busy_s)} of a step"
    return (
        f"computing took {times:.2f} times what {than}: {_ms(measured.compute_s)}, not {_ms(predicted.compute_s)}"
        f"{where}{beside}"
    )


def _say_slowest(predicted: RunPredicted, measured: Measured, made: InputChosen | None) -> str:
    assert measured.slowest_s is not None
    return (
        f"the slowest rank was expected {_ms(predicted.slowest_s)} behind the mean one, and was "
        f"{_ms(measured.slowest_s)} behind it"
    )


def _say_messages(predicted: RunPredicted, measured: Measured, made: InputChosen | None) -> str:
    source = name_source(predicted, "messages") or GUESS
    than = "was measured before step 0" if source == NOW else f"was expected of them ({source})"
    expected_s, exposed_s = predicted.communicate_s, measured.wait_s - (measured.slowest_s or 0.0)
    if measured.slowest_s is None:
        expected_s += predicted.slowest_s
    held = f"a step waited {_ms(exposed_s)} for them, where {_ms(expected_s)} were expected"
    if measured.messages_s is None or predicted.messages_s <= 0:
        return f"messages held steps up otherwise than assumed: {held}"
    times = measured.messages_s / predicted.messages_s
    if abs(times - 1) <= TOLERANCE:
        hidden = "less" if exposed_s > expected_s else "more"
        return f"messages took what {than}, but {hidden} of them was hidden under the backward pass: {held}"
    return f"messages took {times:.2f} times what {than}: {held}"


def tell_trial(predicted: RunPredicted, measured: Measured) -> str:
    """Whether whole steps had foretold it: then the parts go together otherwise than assumed."""
    tried_s = finite(predicted.trial_s)
    if tried_s is None or not is_time(tried_s) or predicted.world_size == 1:
        return ""
    says = f"Whole steps that were tried before step 0 took {_ms(tried_s)}"
    if abs(measured.step_s / predicted.step_s - 1) <= TOLERANCE:
        return f"{says}."
    if abs(measured.step_s / tried_s - 1) <= TOLERANCE:
        return f"{says}, as the run's did: the parts of a step go together otherwise than was assumed."
    if abs(predicted.step_s / tried_s - 1) <= TOLERANCE:
        return f"{says}, as predicted: what made the difference came with the run."
    return f"{says}."


def _ms(seconds: float) -> str:
    """Milliseconds to three digits."""
    ms = seconds * 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.1f} ms" if ms >= 10 else f"{ms:.2f} ms"
