"""One inner step of SVRG or HALP over the flat arrays in one launch (step 9 of the walk).

v = d + wd·z + g̃;  z ← z − lr·v, or z ← Q(z − lr·v) on a grid of a few bits;  w ← w̃ + z. With 8 bits it moves 18 bytes a
parameter: d, w̃, g̃ and z read, z and w written. The plain version is `optim/svrg.py` with `optim/halp.py`, and the two
give the same bits: every product and sum is rounded by itself, and chance is the hash of `optim/rounding.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lockstep.kernels.flat_update import Tiling, cut_tiles
from lockstep.kernels.norms import read_tile
from lockstep.layout import Layout


@triton.jit
def mix32(words):
    """Scramble 32-bit words: shifts, and products modulo 2**32."""
    words = words ^ (words >> 16)
    words = words * tl.full((), 0x7FEB352D, tl.uint32)
    words = words ^ (words >> 15)
    words = words * tl.full((), 0x846CA68B, tl.uint32)
    return words ^ (words >> 16)


@triton.jit
def draw_uniform(seed, step, positions):
    """A number in [0, 1) of 24 bits for every position."""
    low, high = tl.load(seed).to(tl.uint32), tl.load(seed + 1).to(tl.uint32)
    first = mix32(low + step.to(tl.uint32))
    second = mix32(high ^ first)
    bits = mix32(mix32(positions.to(tl.uint32) ^ first) + second)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def update_offsets(
    tiles,
    weights,
    differences,
    anchor,
    full_gradient,
    offset,
    decays,
    lr,
    scale,
    seed,
    count,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One tile of all arrays; padding is zero everywhere and stays so."""
    slot, start, length = read_tile(tiles, tl.program_id(0))
    lanes = tl.arange(0, BLOCK)
    mask = lanes < length
    places = start + lanes
    stored = tl.load(offset + places, mask, other=0).to(tl.float32)
    z = stored
    if BITS > 0:
        s = tl.load(scale)
        z = s * stored
    d = tl.load(differences + places, mask, other=0.0)
    v = (d + tl.load(decays + slot) * z) + tl.load(full_gradient + places, mask, other=0.0)
    move = tl.load(lr) * v
    if BITS > 0:
        x = -tl.div_rn(move, s)
        low = tl.floor(x)
        up = draw_uniform(seed, tl.load(count), places) < x - low
        most: tl.constexpr = (1 << (BITS - 1)) - 1
        stored += low + up.to(tl.float32)
        kept = tl.minimum(tl.maximum(stored, -most - 1.0), most * 1.0)
        stored = tl.where(stored == stored, kept, 0.0)  # what is no number would become the least one
        z = s * stored
    else:
        stored = z - move
        z = stored
    tl.store(offset + places, stored.to(offset.dtype.element_ty), mask)
    tl.store(weights + places, tl.load(anchor + places, mask, other=0.0) + z, mask)


class OffsetUpdate:
    """The launch, and the tables that it reads; deterministic, and the host waits for nothing."""

    def __init__(
        self,
        layout: Layout,
        device: torch.device,
        *,
        weight_decay: float,
        bits: int = 0,
        scale: Tensor | None = None,
        seed: Tensor | None = None,
        tiling: Tiling | None = None,
    ) -> None:
        """`bits` 0: z is FP32, and there is neither `scale` nor `seed`."""
        self.tiling = tiling or Tiling()
        self._bits = bits
        tiles, _ = cut_tiles(layout, self.tiling.block)
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self._decays = torch.tensor([weight_decay if slot.decay else 0.0 for slot in layout.slots], device=device)
        # Without bits these are never touched.
        self._scale = self._decays if scale is None else scale
        self._seed = self._decays if seed is None else seed

    def step(
        self,
        weights: Tensor,
        differences: Tensor,
        anchor: Tensor,
        full_gradient: Tensor,
        offset: Tensor,
        lr: Tensor,
        count: Tensor,
    ) -> None:
        """Move the offset and the weights in place; the differences stay as they are."""
        if not len(self._tiles):
            return
        update_offsets[(len(self._tiles),)](
            self._tiles,
            weights,
            differences,
            anchor,
            full_gradient,
            offset,
            self._decays,
            lr,
            self._scale,
            self._seed,
            count,
            BITS=self._bits,
            BLOCK=self.tiling.block,
            num_warps=self.tiling.num_warps,
            enable_fp_fusion=False,  # or a product and a sum would be rounded once, and the plain version's twice
        )
