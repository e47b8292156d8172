"""What comes before the last launch of a fused update: what the rates depend on, in one pass.

`sum_tiles` adds up squares tile by tile, `settle_clip` adds up all of them, `settle_slots` each slot's, always in the
same order and without atomics, so that every rank and every run gets the same bits. The plain version is
`optim/rule.py` with its rules.
"""

import triton
import triton.language as tl

# Slots and tiles begin and end at multiples of this many elements (`layout.ALIGNMENT`): tables count in them, which
# tells the compiler that it may load 128 bits at a time.
UNIT = tl.constexpr(32)
# Places in `control`, what the launches of one step tell each other: whether any slot is not finite, 1 / loss scale,
# 1 − β₁ᵗ and 1 − β₂ᵗ, and what clipping multiplies the gradients by. The last launch changes scale and count, so the
# others' values are kept here meanwhile.
BAD = tl.constexpr(0)
INVERSE = tl.constexpr(1)
CORRECTION1 = tl.constexpr(2)
CORRECTION2 = tl.constexpr(3)
CLIP = tl.constexpr(4)
NUM_CONTROLS = 5


@triton.jit
def read_tile(tiles, tile):
    """Slot, first element and number of elements of a tile."""
    row = tiles + 3 * tile
    return tl.load(row), tl.load(row + 1) * UNIT, tl.load(row + 2) * UNIT


@triton.jit
def half_offsets(start, lanes, HALF_VECTOR: tl.constexpr):
    """The offsets of a tile for half arrays, of which a thread takes `HALF_VECTOR` neighbours at a time.

    With 4 it holds the same elements of half and FP32 arrays, and none change hands through shared memory.
    """
    return tl.max_contiguous(start + lanes, HALF_VECTOR)


@triton.jit
def load_gradient(half_gradients, gradients, start, split, lanes, mask, HALF_VECTOR: tl.constexpr):
    """A tile of gradients in FP32, from the array of its kind; a tile is half or FP32 as a whole."""
    if start < split:
        offsets = half_offsets(start, lanes, HALF_VECTOR)
        values = tl.load(half_gradients + offsets, mask, other=0.0).to(tl.float32)
    else:
        values = tl.load(gradients + (start - split + lanes), mask, other=0.0)
    return values


@triton.jit
def one_minus_power(log_base, t):
    """1 − bᵗ by its series where it is small: subtracted as it stands it would lose its digits in FP32."""
    x = log_base * t
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit
def adamw_direction(g, w, m, v, decay, beta1, rest1, beta2, rest2, correction1, correction2, epsilon):
    """The new moments of AdamW and LAMB and their r = m̂/(√v̂ + ε) + wd·w."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    # The quick root and quotient of a GPU are off by a few units in the last place, which the norm of r would add up.
    r = tl.div_rn(m / correction1, tl.sqrt_rn(v / correction2) + epsilon) + decay * w
    return m, v, r


@triton.jit
def sum_tiles(
    tiles,
    weights,
    half_gradients,
    gradients,
    first,
    second,
    decays,
    scale,
    count,
    control,
    partials,
    split,
    num_tiles,
    beta1,
    rest1,
    log_beta1,
    beta2,
    rest2,
    log_beta2,
    epsilon,
    WEIGHTS: tl.constexpr,
    DIRECTION: tl.constexpr,
    HALF_VECTOR: tl.constexpr,
    SCALED: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per tile Σw² if `WEIGHTS`, and Σg² or, if `DIRECTION`, LAMB's Σr²; what is not finite in g makes that sum so.

    Gradients are squared as they come, scaled: FP32 holds the squares of all FP16 numbers. LAMB writes no moments yet,
    because the step may be skipped; reading them twice costs no more than writing them first.
    """
    tile = tl.program_id(0)
    slot, start, length = read_tile(tiles, tile)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < length
    offsets = start + lanes
    if WEIGHTS:
        w = tl.load(weights + offsets, mask, other=0.0)
        tl.store(partials + tile, tl.sum(w * w, axis=0))
    g = load_gradient(half_gradients, gradients, start, split, lanes, mask, HALF_VECTOR)
    if DIRECTION:
        if SCALED:
            g = g / tl.load(scale)
        if CLIPPED:
            g = g * tl.load(control + CLIP)
        t = tl.load(count) + 1
        m = tl.load(first + offsets, mask, other=0.0)
        v = tl.load(second + offsets, mask, other=0.0)
        correction1, correction2 = one_minus_power(log_beta1, t), one_minus_power(log_beta2, t)
        decay = tl.load(decays + slot)
        _, _, g = adamw_direction(g, w, m, v, decay, beta1, rest1, beta2, rest2, correction1, correction2, epsilon)
        g = tl.where(mask, g, 0.0)
    tl.store(partials + num_tiles + tile, tl.sum(g * g, axis=0))
    if tile == 0:
        tl.store(control + BAD, 0.0)


@triton.jit
def settle_clip(partials, num_tiles, scale, control, clip_norm, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """One program: what brings all gradients together down to the norm `clip_norm`; 1 where they are below it."""
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for block in range(0, num_tiles, BLOCK):
        squares += tl.load(partials + num_tiles + block + lanes, block + lanes < num_tiles, other=0.0)
    norm = tl.sqrt_rn(tl.sum(squares, axis=0))
    if SCALED:
        norm = norm / tl.load(scale)
    # A norm that is no number is not above: each slot must tell by itself whether it is finite.
    tl.store(control + CLIP, tl.div_rn(clip_norm, tl.where(norm > clip_norm, norm, clip_norm)))


@triton.jit
def settle_slots(
    slots,
    decays,
    partials,
    num_tiles,
    lr,
    scale,
    count,
    control,
    rates,
    is_bad,
    overflows,
    factors,
    trust_coefficient,
    epsilon,
    log_beta1,
    log_beta2,
    ADAPTS: tl.constexpr,
    MOMENTS: tl.constexpr,
    LAYERED: tl.constexpr,
    SCALED: tl.constexpr,
    CLIPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a slot: its norms, its rate lr·λ, by its factor if `LAYERED`, and whether its gradient is finite."""
    slot = tl.program_id(0)
    begin, end = tl.load(slots + 3 * slot), tl.load(slots + 3 * slot + 1)
    adapts = tl.load(slots + 3 * slot + 2) != 0
    lanes = tl.arange(0, BLOCK)
    w_lanes = tl.zeros([BLOCK], tl.float32)
    g_lanes = tl.zeros([BLOCK], tl.float32)
    for block in range(begin, end, BLOCK):
        mask = block + lanes < end
        if ADAPTS:
            w_lanes += tl.load(partials + block + lanes, mask, other=0.0)
        g_lanes += tl.load(partials + num_tiles + block + lanes, mask, other=0.0)
    w_norm = tl.sqrt(tl.sum(w_lanes, axis=0))
    g_square = tl.sum(g_lanes, axis=0)
    g_norm = tl.sqrt(g_square)
    inverse = 1.0
    if SCALED:
        inverse = 1.0 / tl.load(scale)
    trusted = adapts & (w_norm > 0) & (g_norm > 0)
    rate = tl.load(lr)
    if LAYERED:
        rate *= tl.load(factors + slot)
    if ADAPTS:
        divisor = g_norm  # LAMB's is that of r
        if not MOMENTS:
            if CLIPPED:
                divisor *= tl.load(control + CLIP)
            divisor = divisor * inverse + tl.load(decays + slot) * w_norm + epsilon
        rate *= tl.where(trusted, trust_coefficient * w_norm / tl.where(trusted, divisor, 1.0), 1.0)
    tl.store(rates + slot, rate)
    if SCALED:
        bad = ((g_square < float("inf")) == 0).to(tl.int32)
        tl.store(is_bad + slot, bad)
        if bad != 0:
            tl.store(control + BAD, 1.0)  # from several programs at once, but always the same
            tl.store(overflows + slot, tl.load(overflows + slot) + 1)
    if slot == 0:
        if SCALED:
            tl.store(control + INVERSE, inverse)
        if MOMENTS:
            t = tl.load(count) + 1
            tl.store(control + CORRECTION1, one_minus_power(log_beta1, t))
            tl.store(control + CORRECTION2, one_minus_power(log_beta2, t))
