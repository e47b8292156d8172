"""Plain values between ranks: JSON, its length first. Nothing that arrives is ever run or unpickled.

Lists, tables, strings, numbers and None travel; tuples arrive as lists, and whoever receives rebuilds its own types
from them and checks what it needs. Every collective here is of a fixed format: a count of bytes, then the bytes.
"""

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, SharedError

MAX_BYTES = 1 << 30  # of what one rank sends to all; no caller comes near it
MAX_GATHERED_BYTES = 64 << 20  # of what each rank sends, since every rank holds all of it


def encode(value: Any) -> bytes:
    """A plain value as bytes."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> Any:
    """The value; what is no JSON is a sentence."""
    try:
        return json.loads(data.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise LockstepError(f"Another rank sent what is no value ({error}); start all ranks of one release.") from None


def broadcast_bytes(data: bytes, device: torch.device, source: int = 0, *, most: int = MAX_BYTES) -> bytes:
    """One rank's bytes, on every rank; more than `most` is a sentence on all of them."""
    count = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(count, src=source)
    num_bytes = int(count.item())
    _check_count(num_bytes, most)
    message = _to_tensor(data, device) if dist.get_rank() == source else _empty(num_bytes, device)
    if num_bytes:
        dist.broadcast(message, src=source)
    return data if dist.get_rank() == source else message.cpu().numpy().tobytes()


def broadcast_value(value: Any, device: torch.device, source: int = 0) -> Any:
    """One rank's value, on every rank."""
    return decode(broadcast_bytes(encode(value) if dist.get_rank() == source else b"", device, source))


def gather_values(value: Any, device: torch.device) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    data, size = encode(value), dist.get_world_size()
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(data)], dtype=torch.int64, device=device))
    num_bytes = [int(count.item()) for count in counts]
    for count in num_bytes:
        _check_count(count, MAX_GATHERED_BYTES)
    longest = max(num_bytes)  # a collective wants all messages of one length
    parts = [_empty(longest, device) for _ in range(size)]
    dist.all_gather(parts, _to_tensor(data.ljust(longest), device))
    return [decode(part.cpu().numpy().tobytes()[:count]) for part, count in zip(parts, num_bytes, strict=True)]


def _check_count(count: int, most: int) -> None:
    """Every rank knows every count, so all of them refuse the same."""
    if not 0 <= count <= most:
        raise SharedError(f"A message between ranks would be of {count:,} bytes, and {most:,} are the most.")


def _empty(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device=device)


def _to_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    # A copy, as torch warns of memory that it must not write.
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(device)
