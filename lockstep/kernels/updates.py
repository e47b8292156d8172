"""The last launch of a fused update: moments, master weights and half weights in one pass.

A step that is skipped reads and writes none of the arrays. The plain version is `optim/rule.py` with its rules.
"""

import triton
import triton.language as tl

from lockstep.kernels.norms import (
    BAD,
    CLIP,
    CORRECTION1,
    CORRECTION2,
    INVERSE,
    adamw_direction,
    half_offsets,
    load_gradient,
    read_tile,
)


@triton.jit
def settle_scale(scale, is_bad, depths, firsts, bad, num_slots, growth_steps, floor, ceiling, SLOTS: tl.constexpr):
    """The next step's loss scale; after an overflow also whose gradient overflowed nearest to the loss."""
    factor, good = tl.load(scale), tl.load(scale + 1) + 1
    row, skipped = tl.load(scale + 2), tl.load(scale + 3)
    if bad != 0:
        tl.store(scale, tl.maximum(factor / 2, floor))
        tl.store(scale + 1, 0.0)
        tl.store(scale + 2, row + 1)
        tl.store(scale + 3, skipped + 1)
        slots = tl.arange(0, SLOTS)
        mask = slots < num_slots
        own = tl.load(is_bad + slots, mask, other=0) != 0
        depth = tl.where(own, tl.load(depths + slots, mask, other=0), SLOTS)
        is_first = own & (depth == tl.min(depth, axis=0))
        times = tl.load(firsts + slots, mask, other=0)
        tl.store(firsts + slots, times + is_first.to(tl.int32), mask)
    else:
        grows = good >= growth_steps
        tl.store(scale, tl.where(grows, tl.minimum(factor * 2, ceiling), factor))
        tl.store(scale + 1, tl.where(grows, 0.0, good))
        tl.store(scale + 2, 0.0)


@triton.jit
def update_tile(
    tiles,
    tile,
    weights,
    half_weights,
    half_gradients,
    gradients,
    first,
    second,
    rates,
    decays,
    factors,
    lr,
    control,
    inverse,
    split,
    momentum,
    beta1,
    rest1,
    beta2,
    rest2,
    epsilon,
    ADAPTS: tl.constexpr,
    MOMENTS: tl.constexpr,
    LAYERED: tl.constexpr,
    NESTEROV: tl.constexpr,
    HALF_VECTOR: tl.constexpr,
    EVICT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of all arrays; its padding is zero everywhere and stays so."""
    slot, start, length = read_tile(tiles, tile)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < length
    offsets = start + lanes
    # Weights and gradients may still be in the cache from the first launch; the rest must not push them out.
    w = tl.load(weights + offsets, mask, other=0.0)
    m = tl.load(first + offsets, mask, other=0.0, eviction_policy=EVICT)
    if MOMENTS:
        v = tl.load(second + offsets, mask, other=0.0, eviction_policy=EVICT)
    g = load_gradient(half_gradients, gradients, start, split, lanes, mask, HALF_VECTOR) * inverse
    decay = tl.load(decays + slot)
    if MOMENTS:
        correction1, correction2 = tl.load(control + CORRECTION1), tl.load(control + CORRECTION2)
        m, v, r = adamw_direction(g, w, m, v, decay, beta1, rest1, beta2, rest2, correction1, correction2, epsilon)
        w -= tl.load(rates + slot) * r
        tl.store(second + offsets, v, mask, eviction_policy=EVICT)
    elif ADAPTS:
        m = momentum * m + tl.load(rates + slot) * (g + decay * w)
        w -= m
    else:
        d = g + decay * w
        m = momentum * m + d
        rate = tl.load(lr)
        if LAYERED:
            rate *= tl.load(factors + slot)
        if NESTEROV:
            w -= rate * (d + momentum * m)
        else:
            w -= rate * m
    tl.store(first + offsets, m, mask, eviction_policy=EVICT)
    tl.store(weights + offsets, w, mask, eviction_policy=EVICT)
    if start < split:
        offsets = half_offsets(start, lanes, HALF_VECTOR)
        tl.store(half_weights + offsets, w.to(half_weights.dtype.element_ty), mask, eviction_policy=EVICT)


@triton.jit
def update_tiles(
    tiles,
    weights,
    half_weights,
    half_gradients,
    gradients,
    first,
    second,
    rates,
    decays,
    factors,
    lr,
    control,
    count,
    scale,
    is_bad,
    depths,
    firsts,
    split,
    num_tiles,
    num_slots,
    momentum,
    beta1,
    rest1,
    beta2,
    rest2,
    epsilon,
    growth_steps,
    floor,
    ceiling,
    ADAPTS: tl.constexpr,
    MOMENTS: tl.constexpr,
    LAYERED: tl.constexpr,
    NESTEROV: tl.constexpr,
    HALF_VECTOR: tl.constexpr,
    SCALED: tl.constexpr,
    CLIPPED: tl.constexpr,
    REVERSE: tl.constexpr,
    EVICT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a tile; the first program also settles step count and loss scale, which no other one reads."""
    program = tl.program_id(0)
    tile = program
    if REVERSE:
        tile = num_tiles - 1 - program  # what the first launch read last comes first, while the cache still has it
    bad = 0.0
    inverse = 1.0
    if SCALED:
        bad = tl.load(control + BAD)
        inverse = tl.load(control + INVERSE)
    if CLIPPED:
        inverse *= tl.load(control + CLIP)
    if bad == 0:
        update_tile(
            tiles,
            tile,
            weights,
            half_weights,
            half_gradients,
            gradients,
            first,
            second,
            rates,
            decays,
            factors,
            lr,
            control,
            inverse,
            split,
            momentum,
            beta1,
            rest1,
            beta2,
            rest2,
            epsilon,
            ADAPTS,
            MOMENTS,
            LAYERED,
            NESTEROV,
            HALF_VECTOR,
            EVICT,
            BLOCK,
        )
    if program == 0:
        tl.store(count, tl.load(count) + 1 - bad)
        if SCALED:
            settle_scale(scale, is_bad, depths, firsts, bad, num_slots, growth_steps, floor, ceiling, SLOTS)
