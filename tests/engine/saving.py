"""A checkpoint of a moment, written at once."""

from typing import Any

from lockstep.engine.checkpoint import Saved
from lockstep.engine.state import prepare_checkpoint


def save_state(*arguments: Any, **options: Any) -> Saved | None:
    """What `prepare_checkpoint` is given, written at once on rank 0; None elsewhere."""
    write = prepare_checkpoint(*arguments, **options)
    return write() if write else None
