"""A recipe for another batch: each value by a published rule, with where it comes from. Torch-free.

Values follow the published points (`points.py`) in proportion: what the recipe has at its own batch is to the points
there as what comes out is to the points at the new batch. So a recipe that is a published point becomes another one
exactly, a recipe that was tuned keeps its tuning, and the way back leads to the recipe.

On other data or another network no point fits. There a batch is taken for that on the points' data which makes as many
steps an epoch, and momentum and weight decay stay.
"""

import textwrap
import tomllib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tomli_w
from pydantic import ValidationError

from lockstep.config import RunConfig
from lockstep.errors import LockstepError
from lockstep.recipe_values import MOST, Duration, show
from lockstep.recipes.complaints import describe_invalid
from lockstep.recipes.points import Family, Spot, find_family, find_samples
from lockstep.recipes.read import load_recipe, recipe_text

LONGEST_WARMUP = 0.5  # of the run
# Rules without points at hand: the exponent of the batch, and where it comes from.
PLAIN_RULES = {
    "sgd": (1.0, "linear", "Goyal et al., arXiv 1706.02677"),
    "lamb": (0.5, "square root", "You et al., arXiv 1904.00962"),
    "adamw": (0.5, "square root", "Malladi et al., arXiv 2205.10287"),
    "muon": (0.5, "square root", "as adamw: Malladi et al., arXiv 2205.10287"),
}
KEPT = "kept: no point is of this network and data"
MARGIN = 112  # characters of a comment


class Derived(NamedTuple):
    """One setting for the new batch."""

    key: str
    before: Any
    after: Any
    why: str
    untested: str = ""


@dataclass(frozen=True)
class Scaled:
    """A recipe for another batch."""

    name: str
    batch: int
    config: RunConfig
    derived: list[Derived]
    notes: list[str]
    toml: str  # the recipe, with the reasons as comments


class _Places(NamedTuple):
    """The published values at the recipe's batch and at the new one."""

    here: Spot
    there: Spot
    is_same: bool  # whether the points are of this very network and data
    way: str  # the recipe's batch, or the batches that the points were asked for, in words


def scale_recipe(name_or_path: str, batch: int, samples: int | None = None) -> Scaled:
    """Derive a recipe for another global batch; `samples` of an epoch, where the data's name does not tell."""
    name, config = load_recipe(name_or_path)
    for what, number in (("--batch", batch), ("--samples", samples)):
        if number is not None and not 1 <= number <= MOST:
            raise LockstepError(f"{what} {show(number)} must be a whole number from 1 to {MOST:,}.")
    count = samples or _count_samples(config)
    if count is not None and batch > count:
        raise LockstepError(f"--batch {batch} is more than the {count:,} samples of an epoch; give a smaller one.")
    derived, notes = _derive(config, batch, count)
    derived.insert(0, Derived("train.global_batch", config.train.global_batch, batch, "as asked for"))
    command = f"lockstep recipes scale {name_or_path} --batch {batch}{f' --samples {samples}' if samples else ''}"
    title = f"{name} at batch {batch:,} instead of {config.train.global_batch:,}, by `{command}`."
    toml = write_toml(tomllib.loads(recipe_text(name_or_path)), derived, title, notes)
    try:
        scaled = RunConfig.model_validate(tomllib.loads(toml))
    except ValidationError as error:
        raise LockstepError(describe_invalid(error, f"recipe {name} at batch {batch}")) from None
    return Scaled(name, batch, scaled, derived, notes, toml)


def _count_samples(config: RunConfig) -> int | None:
    data = config.data
    if data.source == "generated":
        return data.train_images
    found = find_samples(data.path) if data.path else None
    return None if found is None else max(1, round(found * (1 - data.val_share)))


def _derive(config: RunConfig, batch: int, samples: int | None) -> tuple[list[Derived], list[str]]:
    family = find_family(config.optim.name)
    if family is None or samples is None:
        return _derive_plainly(config, batch, samples)
    optim, train = config.optim, config.train
    places = _find_places(family, config, batch, samples)
    here, there, is_same, _ = places
    notes = [] if is_same else [_describe_other(family, config, batch, samples)]
    momentum = _follow_momentum(optim.momentum, places)
    # What a weight moves for a steady gradient is lr / (1 - momentum): that follows the points.
    speed = there.lr / here.lr
    if here.momentum is not None and there.momentum is not None:
        speed *= (1 - here.momentum) / (1 - there.momentum)
        speed *= (1 - momentum) / (1 - optim.momentum)
    if family.name == "linear":
        why = f"{_name_slope(places)} {optim.lr:g} at {train.global_batch:,} ({_cite(places)})"
    else:
        why = _say(places, speed, optim.lr / here.lr)
    derived = [Derived("optim.lr", optim.lr, _digits(optim.lr * speed), why, there.untested)]
    if optim.name in ("sgd", "lars"):
        why = there.source if is_same else KEPT
        derived.append(Derived("optim.momentum", optim.momentum, momentum, why))
    decay, why = optim.weight_decay, KEPT
    if is_same and here.weight_decay and there.weight_decay:
        decay = _digits(optim.weight_decay * there.weight_decay / here.weight_decay)
        why = f"{there.decay_source}{_beside(optim.weight_decay / here.weight_decay, places)}"
    derived.append(Derived("optim.weight_decay", optim.weight_decay, decay, why))
    stretch = there.epochs / here.epochs
    own_epochs = _in_epochs(train.duration, train.global_batch, samples)
    epochs = own_epochs * stretch
    derived += _derive_lengths(config, batch, stretch, _say(places, stretch, own_epochs / here.epochs), there.untested)
    derived += _derive_warmup(config, batch, samples, own_epochs, epochs, places)
    if family.label_smoothing is not None:
        smoothing = optim.label_smoothing
        why = f"kept; all submissions to MLPerf that were read have {family.label_smoothing:g}"
        derived.append(Derived("optim.label_smoothing", smoothing, smoothing, why))
    if there.untested and is_same:
        steps = f"{epochs * -(-samples // batch):,.0f}"  # the last of an epoch may be smaller
        notes.append(
            f"{there.untested[0].upper()}{there.untested[1:]}. The run would have {steps} steps, where that point had "
            f"{_last_steps(family, there):,.0f}: with fewer, expect to lose accuracy or lengthen train.duration."
        )
    return derived, notes


def _find_places(family: Family, config: RunConfig, batch: int, samples: int) -> _Places:
    """The points at the recipe's batch and at the new one, or at those that make as many steps an epoch."""
    own = config.train.global_batch
    if family.has(config.model.name, samples):
        return _Places(family.read(own), family.read(batch), True, f"{own:,}")
    factor = family.samples / samples
    way = f"from {own * factor:,.0f} to {batch * factor:,.0f} with {family.model} on {family.data}"
    here, there = (_translate(family.read(each * factor), family, factor) for each in (own, batch))
    return _Places(here, there, False, way)


def _translate(spot: Spot, family: Family, factor: float) -> Spot:
    """What is said of the end of the points, with what that is on this data."""
    end = family.points[0 if "below" in spot.untested else -1].batch
    there = f"{end:,} on {family.data}, as {end / factor:,.0f} here"
    return replace(spot, untested=spot.untested.replace(f"{end:,}", there))


def _describe_other(family: Family, config: RunConfig, batch: int, samples: int) -> str:
    steps = f"{samples / batch:,.3g} steps" if batch < samples else "one step"
    return (
        f"No point is published for {config.model.name} on {samples:,} samples, {steps} an epoch: values change as "
        f"those of {family.model} on {family.data} between batches of as many steps an epoch. A start to tune from."
    )


def _say(places: _Places, ratio: float, own: float) -> str:
    """Why a value is what it is: the points changed by `ratio`, and the recipe's own is `own` times theirs."""
    if places.is_same:
        return f"{places.there.source}{_beside(own, places)}"
    return f"× {ratio:.3g}, as {places.way}"


def _beside(own: float, places: _Places) -> str:
    """What a recipe that is off the points brings along."""
    return "" if abs(own - 1) < 1e-6 else f", × {own:.4g} as the recipe's at {places.way}"


def _name_slope(places: _Places) -> str:
    """How the learning rate grows along points that are Goyal's."""
    here, there = ("beyond" in spot.untested for spot in (places.here, places.there))
    if here and there:
        return "square root from"
    return "linear, by the square root beyond the points, from" if here or there else "linear from"


def _cite(places: _Places) -> str:
    is_beyond = any("beyond" in spot.untested for spot in (places.here, places.there))
    return "Hoffer et al., arXiv 1705.08741" if is_beyond else "Goyal et al., arXiv 1706.02677"


def _follow_momentum(own: float, places: _Places) -> float:
    here, there = places.here.momentum, places.there.momentum
    if not places.is_same or not own or here is None or there is None:
        return own
    return max(0.0, round(1 - (1 - own) * (1 - there) / (1 - here), 6))


def _derive_lengths(config: RunConfig, batch: int, stretch: float, why: str, untested: str) -> list[Derived]:
    """The run's length and what is placed within it."""
    optim, train, data = config.optim, config.train, config.data
    shrink = train.global_batch / batch  # of a length in steps, at as many samples
    why = "as many epochs at every published batch" if stretch == 1 else f"epochs {why}"
    duration = _stretch(train.duration, stretch, shrink)
    derived = [Derived("train.duration", train.duration, duration, why, untested)]
    if optim.milestones and (stretch != 1 or any(each.unit == "st" for each in optim.milestones)):
        milestones = tuple(_stretch(each, stretch, shrink) for each in optim.milestones)
        derived.append(Derived("optim.milestones", optim.milestones, milestones, "in proportion to train.duration"))
    for key in ("eval_every", "checkpoint_every"):
        every: Duration = getattr(train, key)
        if every.unit == "st" and every.value:
            after = _stretch(every, 1.0, shrink)
            derived.append(Derived(f"train.{key}", every, after, "after as many samples"))
    if optim.average:
        # Of an update; what it keeps after as many samples stays.
        average = round(min(0.999999, max(0.1, optim.average ** (1 / shrink))), 6)
        derived.append(Derived("optim.average", optim.average, average, "averaged over as many samples"))
    if data.image_sizes and stretch != 1:
        ends: list[dict[str, Any]] = []
        for step in data.image_sizes:
            least = Duration.parse(ends[-1]["until"]).value + 1 if ends else 1
            ends.append(
                {"until": str(Duration(max(least, round(step.until.value * stretch)), "ep")), "size": step.size}
            )
        before = [{"until": str(step.until), "size": step.size} for step in data.image_sizes]
        derived.append(Derived("data.image_sizes", before, ends, "in proportion to train.duration"))
    return derived


def _derive_warmup(
    config: RunConfig, batch: int, samples: int, own_epochs: float, epochs: float, places: _Places
) -> list[Derived]:
    optim, train = config.optim, config.train
    here, there = places.here, places.there
    if optim.warmup.value and here.warmup and there.warmup:
        ratio = there.warmup / here.warmup
        warmup = _stretch(optim.warmup, ratio, train.global_batch / batch)
        why = _say(places, ratio, _in_epochs(optim.warmup, train.global_batch, samples) / here.warmup)
    elif optim.warmup.value and places.is_same and not there.warmup:
        warmup, why = Duration(0, "ep"), f"none, {there.source}"
    elif not optim.warmup.value and not here.warmup and there.warmup:
        warmup = Duration(_digits(there.warmup * own_epochs / here.epochs, 4), "ep")
        why = there.source if places.is_same else f"{there.warmup:g} of {there.epochs:g} epochs, as {places.way}"
    else:
        warmup, why = optim.warmup, "kept: the points have none here" if optim.warmup.value else "none, as it was"
    most = LONGEST_WARMUP * epochs
    if _in_epochs(warmup, batch, samples) > most:
        warmup, why = Duration(_digits(most, 4), "ep"), f"half of the run, which is less than {why}"
    derived = [Derived("optim.warmup", optim.warmup, warmup, why, there.untested)]
    if warmup.value and not optim.warmup.value:
        derived.append(Derived("optim.warmup_lr", optim.warmup_lr, optim.lr, f"the rate at {train.global_batch:,}"))
    elif optim.warmup_lr and not warmup.value:
        derived.append(Derived("optim.warmup_lr", optim.warmup_lr, 0.0, "there is no warm-up"))
    return derived


def _derive_plainly(config: RunConfig, batch: int, samples: int | None) -> tuple[list[Derived], list[str]]:
    """By the batches alone: for a rule without points, or data whose size nobody has said."""
    optim, train = config.optim, config.train
    if optim.name not in PLAIN_RULES:
        raise LockstepError(
            f"How many samples an epoch has is not known from data.path = {show(config.data.path)}, and {optim.name} "
            "is scaled by steps an epoch; give --samples."
        )
    exponent, rule, source = PLAIN_RULES[optim.name]
    lr = _digits(optim.lr * (batch / train.global_batch) ** exponent)
    untested = f"no point is published for {optim.name}: untested" if find_family(optim.name) is None else ""
    notes = [f"{untested[0].upper()}{untested[1:]}."] if untested else []
    if samples is None:
        untested = untested or "steps an epoch are not known: untested"
        notes.append(
            "How many samples an epoch has is not known, so nothing is held against the points; give --samples."
        )
    why = f"{rule} from {optim.lr:g} at {train.global_batch:,} ({source})"
    derived = [Derived("optim.lr", optim.lr, lr, why, untested)]
    if optim.name == "sgd":
        derived.append(Derived("optim.momentum", optim.momentum, optim.momentum, "kept, as Goyal et al. did"))
    derived.append(
        Derived("optim.weight_decay", optim.weight_decay, optim.weight_decay, "kept: no point says otherwise")
    )
    derived += _derive_lengths(config, batch, 1.0, "", untested)
    shrunk = _stretch(optim.warmup, 1.0, train.global_batch / batch)
    derived.append(Derived("optim.warmup", optim.warmup, shrunk, "kept, in epochs", untested))
    return derived, notes


def _last_steps(family: Family, there: Spot) -> float:
    """Steps of the run at the end of the points."""
    last = family.points[0] if "below" in there.untested else family.points[-1]
    return last.epochs * family.samples / last.batch


def _in_epochs(duration: Duration, batch: int, samples: int) -> float:
    return duration.value if duration.unit == "ep" else duration.value * min(1.0, batch / samples)


def _stretch(duration: Duration, stretch: float, shrink: float) -> Duration:
    """A length in epochs, times `stretch`; one in steps of which larger batches need fewer, times `shrink` too."""
    if not duration.value or (stretch == 1 and (duration.unit == "ep" or shrink == 1)):
        return duration
    if duration.unit == "ep":
        return Duration(_digits(duration.value * stretch, 4), "ep")
    return Duration(max(1, round(duration.value * stretch * shrink)), "st")


def _digits(value: float, count: int = 6) -> float:
    return float(f"{value:.{count}g}")


def write_toml(raw: dict[str, Any], derived: list[Derived], title: str, notes: list[str]) -> str:
    """The recipe's own tables with the derived values, each under its reason."""
    tables: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
    reasons: dict[str, str] = {}
    for item in derived:
        section, _, key = item.key.partition(".")
        table = tables.setdefault(section, {})
        if key in table or item.after != item.before:
            table[key] = _plain(item.after)
            reasons[item.key] = f"{item.why}; {item.untested}" if item.untested else item.why
    lines = [*_comment(title), "#"]
    for text in (
        "Reproduces nothing; each derived value says where it comes from. Not yet run by this project.",
        *notes,
    ):
        lines += _comment(text)
    section = ""
    for line in tomli_w.dumps(tables).splitlines():
        if line.startswith("[") and not line.startswith("[["):
            section = line.strip("[]")
        # A list of tables has a head for each, of which the first is told why.
        reason = reasons.pop(line.strip("[]") if line.startswith("[[") else f"{section}.{line.partition(' = ')[0]}", "")
        lines += [*(_comment(reason) if reason else []), line] if line or lines[-1] else []
    return "\n".join(_open(lines)) + "\n"


def _open(lines: list[str]) -> list[str]:
    """An empty line behind the opening comment."""
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return [*lines[:end], *([""] if lines[end:] and lines[end] else []), *lines[end:]]


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, MARGIN, break_long_words=False, break_on_hyphens=False)]


def _plain(value: Any) -> Any:
    """A value as TOML has it."""
    if isinstance(value, Duration):
        return str(value)
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
