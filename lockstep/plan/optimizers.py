"""Update rules beside each other on a cluster: what each keeps, moves and sends, and what a step takes. Torch-free.

Each whole on every device, and sharded: gradients reduce-scattered in a node, a part of the update on each of its
devices, the new weights gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.errors import LockstepError
from lockstep.plan.cluster import Cluster
from lockstep.plan.device import DeviceProfile
from lockstep.plan.rules import RULES
from lockstep.plan.search import build_case, search, time_pass
from lockstep.plan.workload import Workload


@dataclass(frozen=True)
class RuleRow:
    """One rule on so many devices."""

    rule: str
    sharded: bool
    devices: int
    state_bytes: int  # of one device, beside weights and gradients
    moved_bytes: int  # read and written by one device's update
    sent_bytes: int  # gradients, and weights where they are gathered: of the whole model
    update_s: float
    exposed_s: float  # communication that nothing hides
    step_s: float
    images_per_second: float


def compare_rules(
    workload: Workload, profile: DeviceProfile, cluster: Cluster, devices: Sequence[int], batch_per_device: int = 0
) -> list[RuleRow]:
    """Every rule at every size, whole and sharded; sizes at which the recipe cannot run are left out."""
    rows = []
    for name, rule in RULES.items():
        for sharded in (False, True):
            for count in devices:
                asked = replace(workload, rule=name)
                try:
                    case = build_case(asked, profile, cluster, count, batch_per_device, sharded=sharded)
                except LockstepError:
                    continue
                if sharded and case.shape.per_node == 1:
                    continue
                found, row = search(case), time_pass(case)
                width = 2 if any(slot.num_bytes < 4 * slot.elements for slot in row.slots) else 4
                elements = sum(slot.elements for slot in row.slots)
                parts = case.shape.per_node if sharded else 1
                sent = sum(slot.num_bytes for slot in row.slots) + (width * elements if sharded else 0)
                rows.append(
                    RuleRow(
                        rule=name,
                        sharded=sharded,
                        devices=count,
                        state_bytes=rule.state_bytes(width) * elements // parts,
                        moved_bytes=rule.moved_bytes(width) * elements // parts,
                        sent_bytes=sent if count > 1 else 0,
                        update_s=found.simulation.parts.update_s,
                        exposed_s=found.simulation.parts.communicate_s,
                        step_s=found.simulation.step_s,
                        images_per_second=case.global_batch / found.simulation.step_s,
                    )
                )
    return rows
