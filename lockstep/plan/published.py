"""Predicted against published: public runs, and the claims of the paper, by the same search as any plan. Torch-free.

`published.toml` has the runs. A group of them shares one speed, that of one device of its stack: published, or fitted
to the row that is marked calibrated. Nothing else is fitted.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from lockstep.comm.cluster_file import parse_cluster
from lockstep.comm.cost import FLAT, Choice
from lockstep.config import CommConfig
from lockstep.plan.cluster import Cluster, place_devices, read_planned
from lockstep.plan.collectives import predict_all_reduce
from lockstep.plan.derive import DATASHEETS
from lockstep.plan.nccl import predict_nccl
from lockstep.plan.networks import list_layers, sketch_profile
from lockstep.plan.rules import find_rule
from lockstep.plan.search import build_case, search
from lockstep.plan.workload import FIXED_IMAGES, IMAGENET, Workload, time_update

PASSES = 1 << 20  # a published batch is one pass


@dataclass(frozen=True)
class Checked:
    """One published number, and what is predicted for it."""

    run: str
    quantity: str
    published: float
    predicted: float
    calibrated: bool  # fitted to: no prediction
    note: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and what the simulator says of it."""

    claim: str
    claimed: str
    simulated: str
    verdict: str


@cache
def _read_table() -> dict[str, Any]:
    return tomllib.loads((resources.files("lockstep.plan") / "published.toml").read_text(encoding="utf-8"))


def check_published() -> list[Checked]:
    """Every run of `published.toml`, in its order."""
    runs = _read_table()["run"]
    speeds = {run["group"]: _fit_group(run["group"]) for run in runs}
    return [
        Checked(
            run["name"],
            run["quantity"],
            float(run["published"]),
            predict_run(run, speeds[run["group"]]),
            run.get("calibrated", False),
            run.get("note", ""),
        )
        for run in runs
    ]


@cache
def _fit_group(group: str) -> float:
    """Seconds of one image of a group, fixed costs apart: by the published rate, or by its calibrated row."""
    table = _read_table()
    if group in table.get("rate", {}):
        rate = table["rate"][group]
        update_s = _time_update(next(run for run in table["run"] if run["group"] == group))
        return float((rate["batch"] / rate["images_s"] - update_s) / (rate["batch"] + FIXED_IMAGES))
    run = next(run for run in table["run"] if run["group"] == group and run.get("calibrated"))
    low, high = 1e-7, 1.0
    rising = run["quantity"] == "minutes"  # more seconds an image are more minutes, and fewer images a second
    for _ in range(40):
        middle = (low * high) ** 0.5
        is_more = predict_run(run, middle) > run["published"]
        low, high = (low, middle) if is_more == rising else (middle, high)
    return float((low * high) ** 0.5)


def predict_run(run: dict[str, Any], image_s: float) -> float:
    """The quantity of one run, if an image takes one device so long."""
    rate = _predict_rate(run, image_s, run["devices"])
    if run["quantity"] == "images/s":
        return rate
    if run["quantity"] == "minutes":
        return float(run["epochs"] * IMAGENET / rate / 60)
    count = run.get("against", 1)
    return float(rate / run["devices"] / (_predict_rate(run, image_s, count) / count))


def _time_update(run: dict[str, Any]) -> float:
    """Seconds of an update: arrays that travel, and nothing else."""
    sheet = replace(DATASHEETS[run["device"]], precision=run.get("precision", "fp16"))
    return time_update(run.get("model", "resnet50"), run.get("rule", "sgd"), sheet)


def _predict_rate(run: dict[str, Any], image_s: float, devices: int) -> float:
    """Images per second of all devices."""
    model, batch = run.get("model", "resnet50"), run["batch"]
    rule, update_s = find_rule(run.get("rule", "sgd")), _time_update(run)
    # An update is the same at any batch, and comes on top of what passes cost besides their images.
    fixed_s = FIXED_IMAGES * image_s + update_s
    profile = sketch_profile(
        model,
        run["group"],
        image_s,
        fixed_s,
        update_s=update_s,
        precision=run.get("precision", "fp16"),
    )
    comm = CommConfig(fusion=run.get("fusion", "auto"), overlap=run.get("overlap", "auto"))
    workload = Workload(
        recipe=run["name"],
        model=model,
        precision=profile.precision,
        rule=rule.name,
        image_size=profile.image_size,
        global_batch=batch * devices,
        max_batch=PASSES,
        epochs=1.0,
        num_images=IMAGENET,
        image_bytes=0.0,
        prefetch=1,
        comm=comm,
    )
    case = build_case(workload, replace(profile, rule=rule.name), _find_cluster(run["cluster"]), devices)
    case = replace(case, choices=tuple(map(Choice.parse, run.get("all_reduces", []))))
    return case.global_batch / search(case).simulation.step_s


def _find_cluster(name: str) -> Cluster:
    table = _read_table()["cluster"]
    if name not in table:
        return read_planned(name)
    found = parse_cluster(table[name], f"The cluster {name}")
    assert found.intra is not None
    assert found.inter is not None
    return Cluster(name, "", found.counts[0], found.num_nodes, found.intra, found.inter, found.machine)


def count_gradient_bytes(model: str, width: int = 2) -> int:
    """Bytes of all gradients: weights in `width` bytes, what is beside them in FP32."""
    return sum(width * layer.weights + 4 * layer.beside for layer in list_layers(model))


def check_claims() -> list[Claim]:
    """The paper's claims on its own cluster."""
    shape = place_devices(read_planned("p40-100g"), 1024)
    claims = []
    for model, claimed in (("resnet50", "up to 11 ×"), ("alexnet", "up to 3 ×")):
        layers = [2 * layer.weights for layer in list_layers(model)]
        whole = count_gradient_bytes(model)
        # As NCCL of that time was used: a ring for each tensor, γ and β among them; against two fused buffers.
        beside = [2 * layer.beside // layer.num_beside for layer in list_layers(model) for _ in range(layer.num_beside)]
        tensors = [*layers, *beside]
        each = sum(predict_nccl(size, shape).seconds for size in tensors)
        halves = [sum(layers[: len(layers) // 2]), sum(layers[len(layers) // 2 :])]
        options = [Choice("hierarchical", 8), Choice("hierarchical", 16), FLAT]
        hybrid = sum(min(predict_all_reduce(choice, size, shape) for choice in options) for size in halves)
        ring, grouped = predict_nccl(whole, shape).seconds, predict_all_reduce(options[0], whole, shape)
        claims.append(
            Claim(
                f"{model}: communication quicker than NCCL's at 1,024 P40",
                claimed,
                f"{each / hybrid:.1f} × ({ring / grouped:.1f} × for the same buffer)",
                f"{len(tensors)} rings of NCCL 2.2 take {each * 1e3:.0f} ms, two buffers by the best of ring and "
                f"hierarchy {hybrid * 1e3:.0f} ms; of one buffer of {whole / 1e6:.0f} MB a ring takes "
                f"{ring * 1e3:.0f} ms, the hierarchy {grouped * 1e3:.0f} ms",
            )
        )
    return [*claims, _find_crossover(), *_check_minutes()]


def _find_crossover() -> Claim:
    """From which size on a ring beats the paper's hierarchy, at three sizes of cluster."""
    found = []
    for devices in (64, 1024, 2048):
        shape = place_devices(read_planned("p40-100g"), devices)
        low, high = 1e3, 1e12
        for _ in range(60):
            middle = (low * high) ** 0.5
            ring = predict_all_reduce(FLAT, middle, shape)
            is_less = ring < predict_all_reduce(Choice("hierarchical", 8), middle, shape)
            low, high = (low, middle) if is_less else (middle, high)
        found.append(f"{devices:,}: {high / 1e6:.3g} MB")
    return Claim(
        "small tensors by hierarchy, large ones by ring: where they cross",
        "not published",
        ", ".join(found),
        "by the links alone, groups of a node, the hierarchy as Lockstep sends it: the rule holds, and the larger the "
        "cluster, the more is small",
    )


def _check_minutes() -> list[Claim]:
    """The efficiencies that follow from the published minutes, against the simulator's."""
    claims = []
    for devices, minutes, claimed in ((1024, 8.7, "99 %"), (2048, 6.6, "97 %")):
        run = next(r for r in _read_table()["run"] if r["group"] == "jia-resnet50" and r["devices"] == devices)
        image_s = _fit_group("jia-resnet50")
        rate = _predict_rate(run, image_s, devices)
        implied = 90 * IMAGENET / (60 * minutes) / devices / 218
        same_batch = rate / devices / _predict_rate(run, image_s, 1)
        claims.append(
            Claim(
                f"resnet50: scaling efficiency at {devices:,} P40",
                f"{claimed} (the minutes say {implied:.1%})",
                f"{rate / devices / 218:.1%} of 218 images/s, {same_batch:.1%} of one device at batch {run['batch']}",
                "within a few percent of it"
                if devices == 1024
                else "cannot be of 218 images/s by the paper's own minutes; against one device at that batch it may",
            )
        )
    return claims
