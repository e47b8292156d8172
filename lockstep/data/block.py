"""A few rows of a batch on their way to a decoder: read from the source, and their crops placed (steps 2 and 4).

Everything that does not touch pixels is done here for all rows of a block at once: Python costs the training step time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lockstep.data.augment import Boxes, Sides, choose_factors, reduce_boxes
from lockstep.data.decode import DecodeError, Pixels, decode
from lockstep.data.order import Samples
from lockstep.data.reader import Fetch, Loaded, SampleReader
from lockstep.data.retouch import Retouch

Rows = NDArray[np.int64]
# Rows of the batch and the sizes of their images -> where the crops lie, and which are mirrored.
Place = Callable[[Rows, Sides], tuple[Boxes, NDArray[np.bool_]]]


@dataclass
class Request:
    """What a batch shall hold."""

    samples: Samples
    size: int  # side of the squares
    place: Place
    confined: bool  # crops are cut out before they are resized, so that no pixel beside them counts
    replaces: bool  # a bad sample's neighbour takes its place, rather than nothing
    least: int  # pixels a side that a crop keeps when its image is decoded at a reduced scale
    retouch: Retouch | None = None  # what the squares undergo, in training only: no row is missing there
    taken: Samples = field(init=False)  # the samples that really lie in the rows
    readable: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = self.samples.copy()
        self.readable = np.ones(len(self.samples), np.bool_)


@dataclass
class Block:
    """Some rows' images, as they were read, and their crops in the pixels they will have when decoded."""

    rows: Rows
    images: list[Loaded]
    factors: NDArray[np.int64]
    sides: Sides  # of the decoded images
    boxes: Boxes
    flips: NDArray[np.bool_]

    def decode(self, index: int, buffer: Pixels | None) -> Pixels:
        """One image of the block, on the host."""
        _, data, header, is_decoded = self.images[index]
        if not is_decoded:
            return decode(data, header, int(self.factors[index]), buffer)
        pixels = np.frombuffer(data, np.uint8)
        if buffer is not None:
            buffer[: pixels.size] = pixels
            pixels = buffer[: pixels.size]
        return pixels.reshape(header.height, header.width, 3)

    def select(self, chosen: NDArray[np.int64]) -> "Block":
        """Part of the block."""
        images = [self.images[index] for index in chosen.tolist()]
        return Block(
            self.rows[chosen], images, self.factors[chosen], self.sides[chosen], self.boxes[chosen], self.flips[chosen]
        )


def open_block(
    request: Request,
    rows: Rows,
    reader: SampleReader,
    full_size: bool,
    fetch: Fetch | None = None,
) -> Block:
    """Read the rows' samples and place their crops; rows of bad samples are left out unless they can be replaced."""
    images = reader.load_all(request.samples[rows].tolist(), request.replaces, fetch)
    found = [image for image in images if image]
    if len(found) < len(images):
        has_image = np.array([image is not None for image in images])
        request.readable[rows[~has_image]] = False
        rows = rows[has_image]
    request.taken[rows] = [image.sample for image in found]
    headers = np.array([(h.height, h.width, h.min_factor, h.max_factor) for _, _, h, _ in found], np.int64).reshape(
        -1, 4
    )
    sides, bounds = headers[:, :2], headers[:, 2:]
    boxes, flips = request.place(rows, sides)
    factors = bounds[:, 0] if full_size else choose_factors(boxes, request.least, bounds)
    sides = -(-sides // factors[:, None])
    return Block(rows, found, factors, sides, reduce_boxes(boxes, factors, sides, request.confined), flips)


def decode_each(block: Block, reader: SampleReader, take: Callable[[int], None]) -> Rows:
    """Call `take`, which decodes, for each image of the block; returns the rows of those that turned out bad."""
    failed: list[int] = []
    for index, image in enumerate(block.images):
        reader.watch.check()
        try:
            take(index)
        except DecodeError as error:
            reader.count_bad(image.sample, error)
            failed.append(int(block.rows[index]))
    return np.array(failed, np.int64)
