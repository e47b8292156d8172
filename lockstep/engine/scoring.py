"""How good a trained network is on data: top-1, top-5, class by class, and what it takes for what.

The pass over the data is evaluation's own (`evaluate.py`), so that on a run's own data the counts are the run's own.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.comm.world import World
from lockstep.config import DataConfig
from lockstep.data.given import match_classes, open_class_folders
from lockstep.data.shards import is_packed, open_shards
from lockstep.data.sources import Source
from lockstep.engine.build import build_eval_pipeline, open_sources
from lockstep.engine.evaluate import Accuracy, evaluate
from lockstep.engine.inference import TrainedNetwork
from lockstep.engine.mistakes import Mistakes, count_pairs


@dataclass(frozen=True)
class Score:
    """What an evaluation came to."""

    accuracy: Accuracy
    classes: list[tuple[int, int]]  # of each class: right answers, images; (0, 0) for one that the data lacks
    confusion: list[list[int]]  # [class, answer, how often], the right ones too, the most frequent first
    unreadable: list[str]  # images that were left out, with the reason

    @property
    def mistakes(self) -> list[list[int]]:
        """The pairs that are wrong, the most frequent first."""
        return [pair for pair in self.confusion if pair[0] != pair[1]]


def open_scored(trained: TrainedNetwork, data: Path | None = None) -> Source:
    """The run's own validation data, or what lies in a folder or a pack, its classes matched by name."""
    config: DataConfig = trained.config.data
    if data is None:
        where = config.path or "the generated images"
        return match_classes(open_sources(config).val, trained.classes, where)
    root, limit_s = data.expanduser(), config.read_timeout_s
    source: Source = open_shards(root, limit_s)[1] if is_packed(root, limit_s) else open_class_folders(root, limit_s)
    return match_classes(source, trained.classes, str(data))


def score(trained: TrainedNetwork, source: Source, world: World) -> Score | None:
    """Evaluate on every sample of the source, shared by the world's ranks; None on all but the first."""
    mistakes = Mistakes(source, world)
    with build_eval_pipeline(trained.configure(), world, source) as batches:
        accuracy = evaluate(trained.network, batches, world, trained.dtype, mistakes, averages=False)
        unreadable = [name for names in world.gather_values(list(batches.bad.values())) for name in names]
    trained.network.eval()
    answers, _ = mistakes.collect()
    if not world.is_first:
        return None
    labels = np.asarray(source.labels, dtype=np.int64)
    read = np.flatnonzero(answers >= 0)
    confusion = count_pairs(labels[read], answers[read], most=len(read))
    right = Counter({label: count for label, answer, count in confusion if label == answer})
    total = np.bincount(labels[read], minlength=len(trained.classes)).tolist()
    return Score(accuracy, [(right[place], count) for place, count in enumerate(total)], confusion, sorted(unreadable))
