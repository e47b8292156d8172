"""What an evaluation found of the averaged weights, as an evaluation of its own. Torch-free."""

from dataclasses import replace

from lockstep.events import Evaluated


def see_average(event: Evaluated) -> Evaluated | None:
    """The same record with the average's counts in place of the weights'; None where there is no average."""
    if event.average_top1 is None:
        return None
    return replace(
        event,
        top1=event.average_top1,
        top5=event.average_top5,
        correct1=event.average_correct1 or 0,
        correct5=event.average_correct5 or 0,
        loss=float("nan") if event.average_loss is None else event.average_loss,
    )
