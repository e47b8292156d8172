"""Points in time, by the host's clock or by a device's own: what `reducer.py` and `engine/timing.py` measure with.

The host runs ahead of a GPU, so its clock says when work was asked for and not when it was done. There a moment is an
event on the current stream: the device notes the time as it passes, and nothing waits until somebody asks.
"""

import time

import torch

Moment = float | torch.cuda.Event


def take_moment(*, on_gpu: bool, in_recording: bool = False) -> Moment:
    """Now; on a GPU, when the current stream gets here. A moment in a recording is passed by each of its replays."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True, external=in_recording)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """How long after `start` `end` was; on a GPU it must have passed."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return float(start.elapsed_time(end)) / 1000
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


def wait_for(moment: Moment) -> None:
    """Let the host wait until a moment has passed."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()
