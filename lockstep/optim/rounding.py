"""Numbers of a few bits: unbiased rounding, by chance that is a function of (seed, step, position); step 9 of the walk.

A number x between two whole ones goes up with the probability of its fraction, so that the mean over the chance is x
(De Sa et al. 2018, section 2). The chance is a hash: two rounds of 32 bits over an element's position in the layout,
keyed by seed and step. No rank, thread or restart enters it, and a recorded step draws anew at every replay, because it
reads the step from the device. `kernels/offset_update.py` draws the same bits on a GPU.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2**32 / golden ratio
# Of "lowbias32", a hash whose every input bit flips every output bit with nearly even odds (C. Wellons 2018).
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x846CA68B
FORMATS = {8: torch.int8, 16: torch.int16}


def mix32(words: Tensor) -> Tensor:
    """Scramble 32-bit words, which are held in int64; a bijection."""
    words = words ^ (words >> 16)
    words = (words * FIRST_FACTOR) & MASK
    words = words ^ (words >> 15)
    words = (words * (SECOND_FACTOR - (1 << 32))) & MASK  # the same modulo 2**32, and no product leaves int64
    return words ^ (words >> 16)


def split_seed(seed: int, device: torch.device | str = "cpu") -> Tensor:
    """The two words of a seed, on the device, where a recorded step reads them too."""
    low = mix32(torch.tensor((seed + GOLDEN) & MASK))
    high = mix32(low ^ ((seed >> 32) & MASK))
    return torch.stack([low, high]).to(device)


def draw_uniform(seed: Tensor, step: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) of 24 bits for every position; `seed` from `split_seed`, `step` and positions are int64."""
    low, high = seed.unbind()
    first = mix32((low + step) & MASK)
    second = mix32(high ^ first)
    bits = mix32((mix32((positions & MASK) ^ first) + second) & MASK)
    return (bits >> 8).to(torch.float32) * 2.0**-24


def count_levels(bits: int) -> int:
    """The greatest whole number of so many bits."""
    return (1 << (bits - 1)) - 1


def round_sum(whole: Tensor, x: Tensor, uniform: Tensor, bits: int) -> Tensor:
    """whole + x to one of its two whole neighbours, up with the probability of its fraction; beyond the range, its end.

    The fraction is that of x alone: beside 16 bits of a sum FP32 would leave it eight. What is no number becomes zero.
    """
    low = x.floor()
    most = count_levels(bits)
    rounded = (whole.to(x.dtype) + (low + (uniform < x - low))).clamp(-most - 1, most)
    return rounded.nan_to_num(nan=0.0).to(FORMATS[bits])  # or every device would make of it what it likes
