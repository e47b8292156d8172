"""The kinds of files that a data set is made of: images, shards, indexes, packs that were not finished.

As in `fuzz_kinds.py`, checksums are made right again, and what is accepted is used: read, named, decoded, cropped into
a batch, packed, verified, counted.
"""

import io
import json
import random
import struct
import tempfile
import zlib
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from lockstep.bench.damage import NUMBERS, damage_bytes, damage_head, damage_text
from lockstep.bench.fuzz_kinds import Files, to_bytes, write_tree_as_json
from lockstep.data.generated import build_generated
from lockstep.data.index import ARRAYS, MAGIC, PROLOGUE
from lockstep.data.inventory import take_inventory
from lockstep.data.order import Cursor
from lockstep.data.pack import pack_folder
from lockstep.data.pipeline import EvalPipeline, TrainPipeline
from lockstep.data.render import CLASSES, render
from lockstep.data.shards import WORK_FOLDER, Shards, open_shards
from lockstep.data.sources import Source, open_folder
from lockstep.data.verify import verify_shards
from lockstep.errors import LockstepError

SIDE = 32  # of the batches' images
CPU = torch.device("cpu")
NORMAL: dict[str, Any] = {
    "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), "threads": 1, "device": CPU, "decoder": "cpu",
    "read_processes": 0, "resident": "off", "dtype": torch.float32,
}  # fmt: skip


def make_batches(source: Source, out: TextIO) -> bool:
    """Every sample of a source in batches of both kinds; whether none of them was bad."""
    with EvalPipeline(
        source, batch_size=8, rank=0, world_size=1, image_size=SIDE, eval_resize=SIDE + 4, prefetch_batches=1,
        bad_share=1.0, **NORMAL,
    ) as pipeline:  # fmt: skip
        num_good = 0
        for batch in pipeline:
            num_good += len(batch.labels)
            _check_batch(batch.images)
        bad = dict(pipeline.bad)
    for name in bad.values():
        print(name, file=out)
    assert num_good == source.num_samples - len(bad)
    if num_good:
        with TrainPipeline(
            source, global_batch=2, rank=0, world_size=1, seed=0, image_size=SIDE, crop_area=(0.1, 1.0),
            crop_ratio=(0.75, 4 / 3), flip=True, prefetch_batches=1, start=Cursor(), bad_share=1.0, **NORMAL,
        ) as training:  # fmt: skip
            for batch in islice(training, 1):
                _check_batch(batch.images)
    return not bad


def _check_batch(images: torch.Tensor) -> None:
    assert images.shape[1:] == (3, SIDE, SIDE)
    assert bool(images.isfinite().all())


def quiet(title: str) -> Any:
    """Progress that nobody sees."""
    return lambda done, total: None


class ImageFile:
    """An image among good ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._suffix = "jpeg" if "JPEG" in name else name.lower()
        self._whole = build_images(name)
        self._good = self._whole[0]

    def forge(self, chance: random.Random) -> Files:
        data = chance.choice(self._whole)
        way = chance.randrange(4)
        if way == 0:
            data = claim_size(data, chance)
        if way == 1:
            damage = {"png": damage_chunks, "jpeg": damage_segments}.get(self._suffix, damage_head)
            data = damage(data, chance)
        if way > 1 or chance.random() < 0.3:
            data = damage_bytes(data, chance, self._whole)
        damaged = f"val/a/damaged.{self._suffix}"
        return {f"{split}/a/good.{self._suffix}": self._good for split in ("train", "val")} | {damaged: data}

    def use(self, folder: Path, out: TextIO) -> bool:
        _, val = open_folder(folder)
        is_good = make_batches(val, out)
        indexes = pack_folder(folder, folder.parent / "pack", short_side=24, skip_bad=True, workers=1)
        for index in indexes:
            print(*index.skipped, sep="\n", file=out)
        open_shards(folder.parent / "pack")
        if not is_good:
            raise LockstepError("It was left out by name.")
        return True


def build_images(name: str) -> list[bytes]:
    """Whole images of one kind, in every mode that data sets have."""
    pixels = Image.fromarray(render(0, CLASSES[0], np.arange(1))[0]).resize((80, 64))
    images: list[bytes] = []

    def add(image: Image.Image, **options: Any) -> None:
        file = io.BytesIO()
        image.save(file, "JPEG" if "JPEG" in name else name.upper(), **options)
        images.append(file.getvalue())

    if name == "PNG":
        for mode in ("RGB", "RGBA", "P", "L", "LA", "1"):
            add(pixels.convert(mode))
        add(Image.fromarray(np.linspace(0, 65535, 40 * 56).reshape(40, 56).astype(np.uint16)))
        return images
    if "JPEG" not in name:
        for mode in {"WebP": ("RGB", "RGBA"), "GIF": ("P", "L")}.get(name, ("RGB", "P", "L", "1")):
            add(pixels.convert(mode))
        if name == "TIFF":
            for compression in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
                add(pixels, compression=compression)
        elif name != "BMP":
            more = pixels.convert("P" if name == "GIF" else "RGBA")
            add(more, save_all=True, append_images=[more] * 3)
        return images
    is_progressive = name != "JPEG"
    for subsampling in (0, 1, 2):
        add(pixels, subsampling=subsampling, progressive=is_progressive, quality=90)
    add(pixels.convert("L"), progressive=is_progressive)
    add(pixels.convert("CMYK"), progressive=is_progressive)
    add(pixels, exif=b"Exif\0\0" + images[0], progressive=is_progressive, optimize=True)
    if is_progressive:  # scans that come again and again, each as long to decode as the image
        whole = images[0]
        images.append(whole[:-2] + 60 * whole[whole.rindex(b"\xff\xda") : -2] + whole[-2:])
    return images


def claim_size(data: bytes, chance: random.Random) -> bytes:
    """Sides out of nowhere, with a right checksum."""
    sides = [chance.choice([0, 1, 7, 8, 255, 5792, 8192, 20_000, 65_500, 65_535, 2**31]) for _ in range(2)]
    changed = bytearray(data)
    if data[:4] == b"\x89PNG":
        changed[16:24] = b"".join(side.to_bytes(4, "big") for side in sides)
        changed[29:33] = zlib.crc32(changed[12:29]).to_bytes(4, "big")
        return bytes(changed)
    frame = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    if frame > 0:
        changed[frame + 5 : frame + 9] = b"".join((side % 65_536).to_bytes(2, "big") for side in sides)
    return bytes(changed)


def damage_chunks(data: bytes, chance: random.Random) -> bytes:
    """A PNG with a chunk damaged, doubled, moved or blown up, all checksums right."""
    chunks, at = [], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    place = chance.randrange(len(chunks))
    kind, content = chunks[place]
    way = chance.randrange(6)
    if way == 0:
        del chunks[place]
    elif way == 1:
        chunks[place:place] = [chunks[place]] * chance.choice([1, 1000])
    elif way == 2:
        chance.shuffle(chunks)
    elif way == 3:  # pixels, or a text, out of little
        bomb = zlib.compress(bytes(chance.choice([1, 1 << 16, 1 << 24, 1 << 27])))
        kinds = [
            (b"IDAT", bomb),
            (b"zTXt", b"a\0\0" + bomb),
            (b"iCCP", b"a\0\0" + bomb),
            (b"iTXt", b"a\0\1\0\0\0" + bomb),
        ]
        chunks.insert(chance.randrange(1, len(chunks)), chance.choice(kinds))
    elif way == 4:
        chunks[place] = chance.choice([b"tRNS", b"PLTE", b"gAMA", b"acTL", b"fdAT", b"eXIf", b"aaaa"]), content
    else:
        chunks[place] = kind, damage_bytes(content, chance) if content else chance.randbytes(13)
    return data[:8] + b"".join(
        len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")
        for kind, content in chunks
    )


def damage_segments(data: bytes, chance: random.Random) -> bytes:
    """A JPEG with a segment before its first scan damaged, doubled or moved, its length right."""
    segments, at = [], 2
    while at + 4 <= len(data) and data[at] == 0xFF and data[at + 1] != 0xDA:
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        segments.append((data[at + 1], data[at + 4 : at + 2 + length]))
        at += 2 + length
    if not segments:
        return data
    place = chance.randrange(len(segments))
    marker, content = segments[place]
    way = chance.randrange(5)
    if way == 0:
        del segments[place]
    elif way == 1:
        segments[place:place] = [segments[place]] * chance.choice([1, 1000])
    elif way == 2:
        chance.shuffle(segments)
    elif way == 3:
        segments[place] = chance.choice([0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xDB, 0xC4, 0xDD, 0xE1, 0xEE, 0xFE]), content
    else:
        segments[place] = marker, damage_bytes(content, chance)[:65_000] if content else b"\0"
    head = b"".join(
        bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content for marker, content in segments
    )
    return data[:2] + head + data[at:]


class ForgedIndex:
    """An index taken apart, to be altered and put together again."""

    def __init__(self, content: bytes) -> None:
        _, length, _ = PROLOGUE.unpack_from(content)
        self.header: Any = json.loads(content[PROLOGUE.size : PROLOGUE.size + length])
        at = PROLOGUE.size + length
        self.arrays: dict[str, NDArray[Any]] = {}
        for name, kind in ARRAYS.items():
            self.arrays[name] = np.frombuffer(content, kind, self.header["num_samples"], at).copy()
            at += self.arrays[name].nbytes
        self.text: bytes | None = None  # in the header's place
        self.claimed_length: int | None = None
        self.tail = b""

    def sign(self) -> bytes:
        """As it stands, with a right checksum."""
        text = to_bytes(json.dumps(self.header)) if self.text is None else self.text
        length = len(text) if self.claimed_length is None else self.claimed_length
        body = text + b"".join(array.tobytes() for array in self.arrays.values()) + self.tail
        return PROLOGUE.pack(MAGIC, length, zlib.crc32(body, zlib.crc32(struct.pack("<I", length)))) + body

    def damage(self, chance: random.Random) -> None:
        """Alter something."""
        way = chance.randrange(7)
        name = chance.choice(list(ARRAYS))
        if way == 0:
            self.text = to_bytes(write_tree_as_json(json.loads(json.dumps(self.header)), chance))
        elif way == 1:
            self.text = to_bytes(damage_text(json.dumps(self.header), chance))
        elif way == 2:
            shard = chance.choice(self.header["shards"])
            shard[chance.choice([1, 2])] += chance.choice([-512, -1, 1, 512])
            self.header["num_samples"] = sum(shard[1] for shard in self.header["shards"])
        elif way == 3:
            self.arrays[name] = self.arrays[name][: chance.randrange(len(self.arrays[name]))]
        elif way == 4:
            self.claimed_length = chance.choice([0, 1, 64, 2**31, 2**32 - 1, chance.randrange(2000)])
            self.tail = bytes(chance.choice([0, 1, 24]))
        else:
            array = self.arrays[name]
            for _ in range(chance.choice([1, 1, 5])):
                near = int(chance.choice(list(array))) + chance.choice([-512, -1, 1, 512])
                number = chance.choice([*NUMBERS, chance.randrange(-(2**63), 2**63), near])
                array[chance.randrange(len(array))] = np.array(number % 2**64, np.uint64).astype(array.dtype)


class Pack:
    """A finished or unfinished pack of which an index, a shard or a note is damaged."""

    def __init__(self, name: Literal["index", "tar member", "unfinished pack"]) -> None:
        self.name = name
        with tempfile.TemporaryDirectory() as folder:
            images = build_generated(Path(folder), 10, 10)
            pack_folder(images, Path(folder) / "pack", shard_mb=0.01)
            self._images = read_files(images)
            self._whole = read_files(Path(folder) / "pack")
        self._settings = ForgedIndex(self._whole["train.index"]).header["settings"]

    def forge(self, chance: random.Random) -> Files:
        images = {f"images/{name}": data for name, data in self._images.items()}
        forge = {"index": self._forge_index, "tar member": self._forge_shard}.get(self.name, self._forge_unfinished)
        return images | {f"pack/{name}": data for name, data in forge(chance).items()}

    def _forge_index(self, chance: random.Random) -> Files:
        name = chance.choice(["train.index", "train.index", "val.index"])
        if chance.random() < 0.1:
            return self._whole | {name: damage_bytes(self._whole[name], chance, list(self._whole.values()))}
        forged = ForgedIndex(self._whole[name])
        for _ in range(chance.choice([1, 1, 2])):
            forged.damage(chance)
        return self._whole | {name: forged.sign()}

    def _forge_shard(self, chance: random.Random) -> Files:
        """Damaged tar headers and images, of the right size as often as not, under an index that agrees or does not."""
        files = dict(self._whole)
        name = chance.choice([name for name in files if name.startswith("train-")])
        data = damage_bytes(files[name], chance, list(files.values()))
        if chance.random() < 0.8:
            data = data[: len(files[name])].ljust(len(files[name]), b"\0")
        files[name] = data
        if chance.random() < 0.6:
            files["train.index"] = sign_shards(files["train.index"], files)
        return files

    def _forge_unfinished(self, chance: random.Random) -> Files:
        """Without indexes: parts of them in the work folder, and a note of the settings."""
        files = {name: data for name, data in self._whole.items() if not name.endswith(".index")}
        for split in ("train", "val"):
            index = ForgedIndex(self._whole[f"{split}.index"])
            first = 0
            for shard in index.header["shards"]:
                part = ForgedIndex(self._whole[f"{split}.index"])
                part.header |= {"shards": [shard], "num_samples": shard[1]}
                part.arrays = {key: array[first : first + shard[1]] for key, array in index.arrays.items()}
                first += shard[1]
                if chance.random() < 0.3:
                    part.damage(chance)
                files[f"{WORK_FOLDER}/{shard[0]}.index"] = part.sign()
        note = dict(self._settings)
        if chance.random() < 0.5:
            files[f"{WORK_FOLDER}/settings.json"] = to_bytes(json.dumps(note))
            return files
        way = chance.randrange(2)
        text = write_tree_as_json(note, chance) if way else damage_text(json.dumps(note), chance)
        return files | {f"{WORK_FOLDER}/settings.json": to_bytes(text)}

    def use(self, folder: Path, out: TextIO) -> bool:
        pack = folder / "pack"
        if self.name == "unfinished pack":
            self._pack(folder, out)
        refusals: list[LockstepError] = []
        for look in (self._train, self._verify, self._count, self._pack):
            try:
                look(pack if look != self._pack else folder, out)
            except LockstepError as error:
                refusals.append(error)
                print(error, file=out)
        if refusals:
            raise refusals[0]
        return True

    def _train(self, pack: Path, out: TextIO) -> None:
        sources: tuple[Shards, Shards] = open_shards(pack)
        for source in sources:
            source.fingerprint()
            make_batches(source, out)
            for sample in range(source.num_samples):
                print(source.name(sample), source.where(sample), file=out)
                assert 0 <= source.labels[sample] < len(source.classes)

    def _verify(self, pack: Path, out: TextIO) -> None:
        verdict = verify_shards(pack, decode=True, workers=1)
        for damage in verdict.damages:
            print(damage, file=out)
        print(f"{verdict.num_damaged:,} of {verdict.num_samples:,}", file=out)

    def _count(self, pack: Path, out: TextIO) -> None:
        splits, sentence = take_inventory(pack, quiet)
        for split in splits:
            print(*split, split.num_bytes // max(1, split.num_samples), file=out)
        print(sentence, file=out)

    def _pack(self, folder: Path, out: TextIO) -> None:
        for index in pack_folder(folder / "images", folder / "pack", shard_mb=0.01, workers=1):
            print(*index.skipped, sep="\n", file=out)


def sign_shards(index: bytes, files: Files) -> bytes:
    """An index whose checksums and sizes are those of the shards as they are."""
    forged = ForgedIndex(index)
    first = 0
    for shard in forged.header["shards"]:
        data = files[shard[0]]
        shard[2] = len(data)
        for row in range(first, first + shard[1]):
            start = int(forged.arrays["offsets"][row])
            forged.arrays["checksums"][row] = zlib.crc32(data[start : start + int(forged.arrays["lengths"][row])])
        first += shard[1]
    return forged.sign()


def read_files(folder: Path) -> Files:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
