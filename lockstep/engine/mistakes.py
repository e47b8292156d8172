"""What the last evaluation got wrong (step 10 on the walk): which classes are taken for which, and the worst of it.

Every rank fills in its own samples of one array over the validation set, and the arrays are summed: exact, whatever the
ranks, and small (12 bytes a sample). Only the last evaluation of a run is looked at so closely.
"""

import base64
import io
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lockstep.comm.world import World
from lockstep.data.decode import FACTORS, DecodeError, decode, read_header
from lockstep.data.order import Samples
from lockstep.data.sources import Source

MAX_PAIRS = 20_000  # of classes
NUM_WORST = 24
SIDE = 96  # of the small images, in pixels
QUALITY = 80


class Mistakes:
    """Every sample's answer and how sure the network was of it."""

    def __init__(self, source: Source, world: World) -> None:
        self._source = source
        self._world = world
        # One more than the class, so that zero is a sample that nobody could read.
        self._answers = torch.zeros(source.num_samples, dtype=torch.int64)
        self._confidences = torch.zeros(source.num_samples, dtype=torch.float32)

    def add(self, logits: Tensor, samples: Samples) -> None:
        """Note the answers to some of this rank's samples."""
        best, answers = logits.float().softmax(dim=1).max(dim=1)
        numbers = torch.from_numpy(np.asarray(samples, dtype=np.int64))
        self._answers[numbers] = answers.cpu() + 1
        self._confidences[numbers] = best.cpu()

    def collect(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Every sample's answer, -1 for one that nobody could read, and its confidence; every rank must call it."""
        return self._world.sum(self._answers).numpy() - 1, self._world.sum(self._confidences).numpy()

    def find(self) -> dict[str, Any]:
        """The confusion and the worst, as a record has them, on rank 0; every rank must call it."""
        answers, confidences = self.collect()
        if not self._world.is_first:
            return {}
        labels = np.asarray(self._source.labels, dtype=np.int64)
        read = np.flatnonzero(answers >= 0)
        wrong = read[answers[read] != labels[read]]
        # The surest first; of equals, the one that comes first.
        worst = wrong[np.argsort(-confidences[wrong], kind="stable")][:NUM_WORST]
        return {
            "confusion": count_pairs(labels[read], answers[read]),
            "worst": [self._show(int(n), int(answers[n]), float(confidences[n])) for n in worst],
        }

    def _show(self, sample: int, answer: int, confidence: float) -> dict[str, Any]:
        source = self._source
        return {
            "name": "/".join(PurePath(source.name(sample)).parts[-2:]),
            "label": int(source.labels[sample]),
            "predicted": answer,
            "confidence": round(confidence, 6),
            "jpeg": draw_small(source, sample),
        }


def count_pairs(labels: NDArray[np.int64], answers: NDArray[np.int64], most: int = MAX_PAIRS) -> list[list[int]]:
    """[class, answer, how often], the right ones too; the most frequent first, of equals by class."""
    pairs, counts = np.unique(np.stack([labels, answers], axis=1), axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:most]
    return [[*map(int, pairs[index]), int(counts[index])] for index in order]


def draw_small(source: Source, sample: int) -> str:
    """A sample's whole image as a small JPEG in base64; empty if it cannot be read any more."""
    try:
        data = source.read(sample)
        header = read_header(data)
        fitting = [factor for factor in FACTORS if min(header.height, header.width) >= SIDE * factor] or [1]
        pixels = decode(data, header, min(max(fitting), header.max_factor))
    except (OSError, DecodeError):
        return ""
    image = Image.fromarray(pixels)
    image.thumbnail((SIDE, SIDE))
    written = io.BytesIO()
    image.save(written, "JPEG", quality=QUALITY)
    return base64.b64encode(written.getvalue()).decode("ascii")
