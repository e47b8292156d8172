"""A user's own samples: anything with `len(x)` and `x[i] -> (bytes, label)` as a source (step 3 on the walk).

It is user's code that reads, so every answer is checked, and what it raises becomes one sentence that names the sample.
An `OSError` is a sample that cannot be read, like a damaged file's; anything else ends the run. Samples are read by one
thread at a time, because a file that is open in the object has one position; with `is_thread_safe = True` by several.
"""

import contextlib
import errno
import io
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lockstep.data.plain_files import READ_TIMEOUT_S
from lockstep.data.sources import IMAGES, DataSet, choose_probes, describe_bytes, hash_arrays, hash_labels, read_probes
from lockstep.data.threads import GivenUp, Steps, look
from lockstep.errors import LockstepError
from lockstep.named import describe, phrase_error

SPLITS = {"train": "training", "val": "validation"}
MAX_CLASSES = 1 << 20
MEMBERS = ("classes", "num_samples", "labels", "read", "name", "fingerprint")  # of a DataSet


class OwnData:
    """One split of a user's data, in the object's own order."""

    def __init__(self, samples: Any, split: str, labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self._samples, self._split = samples, split
        self._lock = contextlib.nullcontext() if getattr(samples, "is_thread_safe", False) is True else threading.Lock()
        self.labels = labels
        self.classes = classes
        self.read_timeout_s = READ_TIMEOUT_S  # for the samples of its fingerprint

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """The encoded image; OSError when there is none to be had, LockstepError for a mistake in the object."""
        with self._lock:
            data, label = ask_sample(self._samples, self._split, index)
        if label != self.labels[index]:
            raise LockstepError(
                f"{_open(self.name(index))} has label {label}, but the object's labels say {self.labels[index]}; "
                "each sample needs one label that stays."
            )
        return data

    def name(self, index: int) -> str:
        """The sample's number, for messages."""
        return name_sample(self._samples, self._split, index)

    def fingerprint(self) -> dict[str, str]:
        """What tells this data from other: how many, their labels, and the bytes of a few of them."""
        found = read_probes(self, self.read_timeout_s)
        told = {"labels": hash_labels(self.classes, self.labels), IMAGES: describe_bytes(found)}
        if len(found) == len(choose_probes(self.num_samples)):  # what checkpoints of earlier versions have
            told["bytes"] = hash_arrays(*found.values())
        return told


def open_own(train: Any, val: Any, limit_s: float = READ_TIMEOUT_S) -> tuple[DataSet, DataSet]:
    """The two splits as sources of the same classes; what is a source already stays as it is."""
    if all(hasattr(split, member) for split in (train, val) for member in MEMBERS):
        return train, val
    splits = {"train": train, "val": val}
    labels = {split: look(lambda steps, s=split: _collect(splits[s], s, steps), limit_s) for split in splits}  # type: ignore[misc]
    classes = _find_classes(splits, labels)
    for split, numbers in labels.items():
        wrong = np.flatnonzero((numbers < 0) | (numbers >= len(classes)))
        if len(wrong):
            raise LockstepError(
                f"{_open(name_sample(splits[split], split, int(wrong[0])))} has label {numbers[wrong[0]]}; labels "
                f"number the {len(classes)} classes from 0."
            )
    opened = OwnData(train, "train", labels["train"], classes), OwnData(val, "val", labels["val"], classes)
    for source in opened:
        source.read_timeout_s = limit_s
    return opened


def _open(text: str) -> str:
    """As the first words of a sentence."""
    return text[:1].upper() + text[1:]


def name_sample(samples: Any, split: str, index: int) -> str:
    """What to call a sample in the middle of a sentence."""
    return f"sample {index} of the {SPLITS[split]} data ({describe(samples)})"


def ask_sample(samples: Any, split: str, index: int) -> tuple[bytes, int]:
    """What the object says of one sample, in the form it must have."""
    name = name_sample(samples, split, index)
    try:
        answer = samples[index]
    except OSError as error:
        # A sentence is made of `strerror`, which an error raised with a text alone has not.
        raise OSError(error.errno or errno.EIO, error.strerror or str(error) or type(error).__name__) from error
    except (GivenUp, LockstepError):
        raise
    except Exception as error:
        raise LockstepError(f"{_open(name)} cannot be had: {phrase_error(error)}.") from error
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise LockstepError(f"{_open(name)} is a {type(answer).__name__}, and must be two things: bytes and label.")
    data, label = answer
    return _read_bytes(data, name), _read_label(label, name)


def _read_bytes(data: Any, name: str) -> bytes:
    if isinstance(data, bytes):
        return data
    if isinstance(data, bytearray | memoryview):
        return bytes(data)
    if isinstance(data, Image.Image):  # as torchvision's data sets have them
        return encode_image(data)
    raise LockstepError(
        f"{_open(name)} comes as {type(data).__name__}, and must come as the bytes of a JPEG or PNG file, or as a PIL "
        "image: leave out ToTensor and what else changes it, as Lockstep does that."
    )


def encode_image(image: Image.Image) -> bytes:
    """A PIL image as a PNG, without loss: the pixels that its file is decoded to; OSError where it has none."""
    written = io.BytesIO()
    try:
        if image.mode.startswith("I;16"):  # of which the decoder, too, keeps the upper byte
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):  # Pillow would clip them at 255
            raise ValueError(f"pixels of mode {image.mode} have no colours; convert it to 8-bit RGB or grey")
        image.convert("RGB").save(written, "PNG", compress_level=1)
    except Exception as error:  # it may be read from its file only now, and that raises anything
        raise OSError(errno.EIO, phrase_error(error)) from error
    return written.getvalue()


def _read_label(label: Any, name: str) -> int:
    if isinstance(label, int | np.integer) and not isinstance(label, bool):
        return int(label)
    with contextlib.suppress(Exception):  # a tensor of one number
        number = np.asarray(label)
        if number.dtype.kind in "iu" and number.ndim == 0:
            return int(number)
    raise LockstepError(f"{_open(name)} has a {type(label).__name__} as its label, and must have a whole number.")


def _collect(samples: Any, split: str, steps: Steps) -> NDArray[np.int64]:
    """Every label: as the object lists them in `labels` or `targets`, or by asking for every sample once."""
    what = f"the {SPLITS[split]} data ({describe(samples)})"
    steps.ask(what)
    try:
        count = len(samples)
        listed = getattr(samples, "labels", None)
        listed = getattr(samples, "targets", None) if listed is None else listed
        found = None if listed is None or callable(listed) else np.asarray(listed)
    except Exception as error:
        raise LockstepError(f"{_open(what)} cannot be used: {phrase_error(error)}.") from error
    if not count:
        raise LockstepError(f"{_open(what)} is empty; give at least one sample.")
    if not hasattr(samples, "__getitem__"):
        raise LockstepError(f"{_open(what)} cannot be indexed; it needs len(x) and x[i] -> (bytes, label).")
    if found is not None:
        if found.dtype.kind not in "iu" or found.shape != (count,):
            raise LockstepError(
                f"The labels of {what} must be {count} whole numbers, one for each sample, and are {found.dtype} of "
                f"shape {list(found.shape)}."
            )
        return found.astype(np.int64)
    numbers = np.zeros(count, np.int64)
    for index in range(count):
        steps.ask(name_sample(samples, split, index))
        try:
            number = ask_sample(samples, split, index)[1]
        except OSError as error:
            raise LockstepError(
                f"{_open(name_sample(samples, split, index))} cannot be read ({error.strerror}), and with it its "
                "label; leave it out, or give the object `labels`."
            ) from error
        numbers[index] = max(-1, min(number, MAX_CLASSES))
    return numbers


def _find_classes(splits: dict[str, Any], labels: dict[str, NDArray[np.int64]]) -> tuple[str, ...]:
    """The names that the training data gives, or the numbers from 0 on."""
    named = {split: _read_classes(samples, split) for split, samples in splits.items()}
    if named["train"] and named["val"] and named["train"] != named["val"]:
        raise LockstepError("The training and the validation data have other `classes`; give both the same.")
    if names := named["train"] or named["val"]:
        return names
    count = int(max(numbers.max() for numbers in labels.values())) + 1
    if count > MAX_CLASSES:
        raise LockstepError(f"Labels reach beyond {MAX_CLASSES:,}; they must number the classes from 0.")
    missing = np.flatnonzero(np.bincount(labels["train"].clip(0), minlength=count) == 0)
    if len(missing):
        raise LockstepError(
            f"No training sample has label {missing[0]}, though labels reach {count - 1}; number the classes from 0 "
            "without holes, or give the training data `classes`, their names."
        )
    return tuple(map(str, range(count)))


def _read_classes(samples: Any, split: str) -> tuple[str, ...]:
    given = getattr(samples, "classes", None)
    if given is None:
        return ()
    if (
        isinstance(given, str)
        or not isinstance(given, list | tuple)
        or not all(isinstance(name, str) for name in given)
    ):
        raise LockstepError(f"`classes` of the {SPLITS[split]} data ({describe(samples)}) must be a list of names.")
    return tuple(given)
