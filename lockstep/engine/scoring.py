"""How good a trained network is on data: top-1, top-5, class by class, and what it takes for what.

The pass over the data is evaluation's own (`evaluate.py`), so that on a run's own data the counts are the run's own.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lockstep.comm.world import World
from lockstep.config import DataConfig
from lockstep.data.given import holds_classes, match_classes, open_class_folders, open_object
from lockstep.data.parquet import holds_parquet
from lockstep.data.shards import Shards, is_packed
from lockstep.data.sources import ImageFolder, Source
from lockstep.data.split_files import WORDS
from lockstep.data.webdataset import find_tars, read_or_build, refuse_compressed
from lockstep.engine.build import Sources, build_eval_pipeline, open_sources
from lockstep.engine.evaluate import Accuracy, evaluate
from lockstep.engine.inference import TrainedNetwork
from lockstep.engine.mistakes import Mistakes, count_pairs
from lockstep.errors import LockstepError
from lockstep.named import find_named, is_name, phrase_error


@dataclass(frozen=True)
class Score:
    """What an evaluation came to."""

    accuracy: Accuracy
    classes: list[tuple[int, int]]  # of each class: right answers, images; (0, 0) for one that the data lacks
    confusion: list[list[int]]  # [class, answer, how often], the right ones too, the most frequent first
    unreadable: list[str]  # images that were left out, with the reason
    notes: tuple[str, ...] = ()  # what there is to say of the data, in sentences

    @property
    def mistakes(self) -> list[list[int]]:
        """The pairs that are wrong, the most frequent first."""
        return [pair for pair in self.confusion if pair[0] != pair[1]]


def open_scored(trained: TrainedNetwork, data: Any = None) -> Source:
    """The run's own validation data, or what else is given, its classes matched by name.

    That is a folder of anything that training reads, a user's data set, `(train, val)` of which the second counts, a
    function that returns either, or its name.
    """
    config: DataConfig = trained.config.data
    if isinstance(data, str) and is_name(data) and not Path(data).exists():
        data = find_named(data, "data")
    if isinstance(data, str | Path):
        return _open_folder(trained, Path(data).expanduser())
    if data is None:
        return _take_val(open_sources(config), config, trained.classes, config.path or "the generated images")
    return open_object(_choose_val(data), trained.classes, config.read_timeout_s)


def _open_folder(trained: TrainedNetwork, root: Path) -> Source:
    """The validation part of what lies in a folder; where nothing is for training, all of it."""
    own, limit_s, known = trained.config.data, trained.config.data.read_timeout_s, trained.classes
    config = own.model_copy(update={"source": "folder", "path": str(root), "val_share": 0.0})
    if own.val_share and own.source == "folder" and root.absolute() == Path(own.path).expanduser().absolute():
        config = own  # the other samples there were trained with
    elif not is_packed(root, limit_s):
        tars = [] if holds_classes(root, known, limit_s) else find_tars(root, limit_s)
        if tars and not _names_training(root, tars):
            return match_classes(Shards(root, read_or_build(root, [tars, []], None, 0, limit_s)[0]), known, str(root))
        if not tars and (holds_classes(root, known, limit_s) or not holds_parquet(root, limit_s)):
            refuse_compressed(root, limit_s)
            # Not as training does it: here there need not be a train/, nor every class.
            return open_class_folders(root, known, limit_s)
    return _take_val(open_sources(config), config, known, str(root))


def _names_training(root: Path, files: list[Path]) -> bool:
    """Whether some of the files are for training, by their names."""
    words = (set(re.findall(r"[a-z]+", str(path.relative_to(root)).lower())) for path in files)
    return any(one & set(WORDS["train"]) for one in words)


def _take_val(sources: Sources, config: DataConfig, known: tuple[str, ...], where: str) -> Source:
    # What was left out of a folder's train/ is nothing to do with this; elsewhere the first split speaks for both.
    speaks_for_both = not isinstance(sources.train, ImageFolder) or config.val_share > 0
    spoken = (sources.train, sources.val) if speaks_for_both else (sources.val,)
    notes = tuple(note for source in spoken for note in getattr(source, "notes", ()))
    return match_classes(sources.val, known, where, notes)


def _choose_val(data: Any) -> Any:
    """A data set, out of what is one, a pair of them, or a function that returns either."""
    if isinstance(data, type) or (callable(data) and not hasattr(data, "__getitem__")):
        build: Callable[[], Any] = data
        try:
            data = build()
        except LockstepError:
            raise
        except Exception as error:
            raise LockstepError(f"data failed: {phrase_error(error)}.") from error
    return data[1] if isinstance(data, tuple | list) and len(data) == 2 and not _is_sample(data[0]) else data


def _is_sample(value: Any) -> bool:
    """Whether this is an image with its label: a list of two such is a data set, and no pair of data sets."""
    kinds = bytes | bytearray | memoryview | Image.Image
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], kinds)


def score(trained: TrainedNetwork, source: Source, world: World) -> Score | None:
    """Evaluate on every sample of the source, shared by the world's ranks; None on all but the first."""
    mistakes = Mistakes(source, world)
    with build_eval_pipeline(trained.configure(), world, source) as batches:
        flip = trained.config.data.eval_flip
        accuracy = evaluate(trained.network, batches, world, trained.dtype, mistakes, averages=False, flip=flip)
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
    classes = [(right[place], count) for place, count in enumerate(total)]
    return Score(accuracy, classes, confusion, sorted(unreadable), tuple(getattr(source, "notes", ())))
