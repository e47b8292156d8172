"""The kind of file that a planner reads of a device: what `lockstep profile` wrote, damaged."""

import json
import random
from pathlib import Path
from typing import TextIO

from rich.console import Console

from lockstep.bench.damage import damage_bytes, damage_text
from lockstep.bench.fuzz_kinds import Files, to_bytes, write_tree_as_json
from lockstep.plan.derive import DATASHEETS, derive
from lockstep.plan.device import BatchTime, DeviceInput, DeviceProfile, LayerTime, SlotReady, from_json, to_json
from lockstep.plan.plan import Execution
from lockstep.plan.shipped import read_file
from lockstep.report.device_table import build_batch_table, build_layer_table, describe_profile

FILE = "device.json"
ASKED = (1, 24, 100_000)  # batches: below, between and beyond those in the file


class DeviceFile:
    """A profile of a device."""

    name = "device profile"

    def __init__(self) -> None:
        ways = (Execution("own", True), Execution())
        rows = tuple(_build_row(batch, way) for way in ways for batch in (16, 32))
        found = DeviceInput("cpu", 500.0, 110_000.0, 5e10)
        self._text = to_json(
            DeviceProfile("H200", "resnet50", 224, "fp16", "lars", "measured", "torch 2", 10**11, rows, found)
        )

    def forge(self, chance: random.Random) -> Files:
        way = chance.randrange(3)
        if way == 0:
            return {FILE: damage_bytes(self._text.encode(), chance)}
        if way == 1:
            return {FILE: to_bytes(damage_text(self._text, chance))}
        return {FILE: to_bytes(write_tree_as_json(json.loads(self._text), chance))}

    def use(self, folder: Path, out: TextIO) -> bool:
        profile = read_file(folder / FILE)
        assert to_json(from_json(to_json(profile))) == to_json(profile)
        console = Console(file=out, width=120)
        for line in describe_profile(profile):
            console.print(line, highlight=False, soft_wrap=True)
        for way in profile.executions:
            console.print(build_batch_table([row for row in profile.batches if row.execution == way]))
        for batch in ASKED:
            console.print(build_layer_table(profile.at(batch)))
        derive(profile, DATASHEETS["h200"], DATASHEETS["p40"])
        return True


def _build_row(batch: int, way: Execution) -> BatchTime:
    seconds = batch * 1e-4
    return BatchTime(
        batch=batch,
        execution=way,
        step_s=3 * seconds,
        forward_s=seconds,
        backward_s=1.5 * seconds,
        update_s=0.5 * seconds,
        launch_s=1e-4,
        memory_bytes=batch << 20,
        layers=(
            LayerTime("conv1", 0.6 * seconds, seconds, batch << 18, ("conv1.weight", "bn1.weight")),
            LayerTime("fc", 0.4 * seconds, 0.5 * seconds, batch << 10, ("fc.weight",)),
        ),
        slots=(
            SlotReady("fc.weight", 1000, 2000, 0.5 * seconds),
            SlotReady("conv1.weight", 500, 1000, 1.5 * seconds),
            SlotReady("bn1.weight", 64, 256, 1.4 * seconds),
        ),
    )
