"""Gradient sizes -> cut points (step 8 on the walk): which slots travel together. Torch-free and pure.

The rule is the paper's (section on tensor fusion): pack slots in backward order until a threshold; a slot larger than
the threshold travels alone.
"""

from dataclasses import dataclass

from lockstep.layout import Layout


@dataclass(frozen=True)
class Buffer:
    """A contiguous run of slots sent together: elements [start, end) of the flat gradients, slots [first, last)."""

    start: int
    end: int
    first: int
    last: int


def plan_buffers(layout: Layout, threshold_bytes: float, bytes_per_element: int = 4) -> tuple[Buffer, ...]:
    """Cut the layout into buffers of at most `threshold_bytes`, in the order backward fills them."""
    slots = layout.slots
    cuts = [0]
    for index, slot in enumerate(slots):
        size = (slot.end - slots[cuts[-1]].offset) * bytes_per_element
        if size > threshold_bytes and index > cuts[-1]:
            cuts.append(index)
    cuts.append(len(slots))
    # A buffer ends where the next begins, so that the padding between slots belongs to exactly one of them.
    edges = [*(slots[cut].offset for cut in cuts[:-1]), layout.numel]
    return tuple(
        Buffer(start, end, first, last)
        for start, end, first, last in zip(edges[:-1], edges[1:], cuts[:-1], cuts[1:], strict=True)
    )
