"""Can the input feed a busy GPU? `python -m tests.data.feed FOLDER` pulls batches while matrices are multiplied.

The consumer keeps the device busy for a set time a batch and, as a training step does, calls many small operators from
Python, which is what the decode threads compete with. Also runs on a CPU, then with next to no consumer.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from lockstep.data.order import Cursor
from lockstep.data.pipeline import TrainPipeline


class Photos:
    """The images of a folder and of those below it, over and over."""

    def __init__(self, folder: Path, num_samples: int) -> None:
        self._paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        self.num_samples = num_samples
        self.labels = np.zeros(num_samples, np.int64)

    def read(self, index: int) -> bytes:
        with open(self._paths[index % len(self._paths)], "rb", buffering=0) as file:
            return file.read()

    def name(self, index: int) -> str:
        return str(self._paths[index % len(self._paths)])


class Consumer:
    """Work of about `busy_ms` a batch on the device, and `num_ops` small operators from Python."""

    def __init__(self, device: torch.device, busy_ms: float, num_ops: int) -> None:
        self._on_gpu = device.type == "cuda"
        side, dtype = (8192, torch.float16) if self._on_gpu else (64, torch.float32)
        self._matrix = torch.randn(side, side, device=device).to(dtype)
        self._small = torch.zeros(64, device=device)
        self._num_ops = num_ops
        self._repeats = max(1, round(busy_ms / self._measure_ms())) if self._on_gpu else 1
        self._behind: list[torch.cuda.Event] = []

    def _measure_ms(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for turn in range(6):
            if turn == 1:
                start.record()
            self._matrix @ self._matrix
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 5

    def take(self, images: torch.Tensor) -> None:
        images.sum()
        for _ in range(self._num_ops):
            self._small.add_(1)
        for _ in range(self._repeats):
            self._matrix @ self._matrix
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._behind.append(event)
            if len(self._behind) > 2:  # a training loop is a few steps ahead of its device, not more
                self._behind.pop(0).synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--warm-up", type=float, default=5)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--decoder", default="auto", choices=("auto", "cpu", "nvjpeg", "both"))
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--busy-ms", type=float, default=28)
    parser.add_argument("--ops", type=int, default=600)
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    consumer = Consumer(device, given.busy_ms, given.ops)
    with TrainPipeline(
        Photos(given.folder, 1_281_167),
        global_batch=given.batch,
        rank=0,
        world_size=1,
        seed=0,
        image_size=224,
        crop_area=(0.08, 1.0),
        crop_ratio=(3 / 4, 4 / 3),
        flip=True,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        threads=given.threads,
        prefetch_batches=given.ahead,
        device=device,
        start=Cursor(),
        bad_share=0.001,
        dtype=torch.float16 if device.type == "cuda" else torch.float32,
        decoder=given.decoder,
        resident="off",
    ) as pipeline:
        for phase, seconds in (("warm-up", given.warm_up), ("measured", given.seconds)):
            start, count, waited = time.perf_counter(), 0, 0.0
            while (now := time.perf_counter()) - start < seconds:
                images = next(pipeline).images
                waited += time.perf_counter() - now
                consumer.take(images)
                count += len(images)
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent = time.perf_counter() - start
            print(f"{phase}: {count / spent:.0f} images/s, {100 * waited / spent:.0f} % of the host's time on waiting")
        print(pipeline.describe())


if __name__ == "__main__":
    main()
