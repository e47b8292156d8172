"""A predicted run as the records that a run emits, so that one report draws both (after `search.py`). Torch-free."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.config import RunConfig, to_toml
from lockstep.errors import LockstepError
from lockstep.events import LOG_NAME, Event, Notice, PlanChosen, RunEnded, RunStarted, StepDone, TimelineTaken, encode
from lockstep.files import write_whole
from lockstep.plan.choose import explain_choice
from lockstep.plan.graph import COMPUTE, COPY, DECODER, INTRA, NIC, READER
from lockstep.plan.plan import to_reduction_table
from lockstep.plan.prediction import Prediction, to_json
from lockstep.plan.search import Case, Found, time_pass
from lockstep.plan.simulate import Scheduled, Simulation, list_ends

PREDICTION_NAME = "prediction.json"
NUM_RECORDS = 20  # of steps: each says the same
NUM_STEPS = 3  # of the timeline
NUM_CLASSES = 1000


def list_events(
    case: Case, found: Found, prediction: Prediction, config: RunConfig, run: str, start_s: float
) -> list[Event]:
    """The records of the whole run, as if it had begun at `start_s`; what cannot be predicted, such as the loss, is
    not a number."""
    parts, steps = prediction.parts, prediction.steps
    row = time_pass(case)
    per_epoch = -(-case.workload.num_images // case.global_batch)
    table = config.model_dump(mode="json")
    table["train"]["global_batch"] = case.global_batch
    events: list[Event] = [
        RunStarted(
            time_s=start_s,
            run=run,
            recipe=prediction.recipe,
            config=table,
            world_size=prediction.devices,
            device=f"{prediction.device}, predicted",
            num_train=case.workload.num_images,
            num_val=0,
            num_classes=NUM_CLASSES,
            num_parameters=sum(slot.elements for slot in row.slots),
            steps_total=steps,
            steps_per_epoch=per_epoch,
            start_step=0,
            versions={"lockstep": __version__},
            layers=[slot.name for slot in row.slots],
        ),
        Notice(time_s=start_s, level="info", text=f"This run was predicted, not made. {prediction.advice}"),
        PlanChosen(
            time_s=start_s,
            source="predicted",  # by which readers know that nothing was trained
            seconds=0.0,
            topology=f"{prediction.nodes}x{case.shape.per_node}",
            backend=case.shape.machine.backend if prediction.devices > 1 else "",
            batch=prediction.batch_per_device,
            execution=prediction.execution,
            reduction=prediction.reduction.text if prediction.devices > 1 else "",
            plan={"execution": asdict(row.execution), "reduction": to_reduction_table(found.reduction)},
            trials=explain_choice(found.trials),
        ),
    ]
    compute_s = parts.forward_s + parts.backward_s + parts.update_s + parts.launch_s
    comm_s = parts.communicate_s + parts.slowest_s
    for step in sorted({max(1, steps * number // NUM_RECORDS) for number in range(1, NUM_RECORDS + 1)}):
        events.append(
            StepDone(
                time_s=start_s + step * prediction.step_s,
                step=step,
                epoch=step / per_epoch,
                loss=float("nan"),
                top1=float("nan"),
                lr=float("nan"),
                images_per_second=prediction.images_per_second,
                input_s=parts.input_s,
                compute_s=compute_s,
                comm_s=comm_s,
                step_s=prediction.step_s,
            )
        )
    end_s = start_s + prediction.train_s
    events.append(_take_timeline(found.simulation, steps, start_s))
    events.append(
        RunEnded(
            time_s=end_s,
            status="finished",
            step=steps,
            epoch=prediction.epochs,
            wall_s=prediction.train_s,
            train_s=prediction.train_s,
            images=round(case.workload.num_images * prediction.epochs),
            images_per_second=prediction.images_per_second,
            speed_one_rank=prediction.speed_one_rank,
            world_size=prediction.devices,
            efficiency=prediction.efficiency,
            share_compute=compute_s / prediction.step_s,
            share_comm=comm_s / prediction.step_s,
            share_input=parts.input_s / prediction.step_s,
            energy_j=prediction.energy_j,
        )
    )
    return events


def _take_timeline(simulation: Simulation, steps: int, start_s: float) -> TimelineTaken:
    """The last steps of a simulation, numbered as the first of the run."""
    count = min(NUM_STEPS, steps)
    first = simulation.num_steps - count
    ends = list_ends(simulation.scheduled, simulation.num_steps)
    spans: list[dict[str, Any]] = []
    for step in range(first, simulation.num_steps):
        own = [span for span in simulation.scheduled if span.task.step == step]
        spans += _cut_step(own, ends[step - 1], ends[step])
        spans += _list_beside(own)
    origin = ends[first - 1]
    return TimelineTaken(
        time_s=start_s,
        rank=0,
        first_step=0,
        num_steps=count,
        seconds=ends[-1] - origin,
        spans=[
            {
                **span,
                "step": span["step"] - first,
                "start_s": max(0.0, span["start_s"] - origin),
                "end_s": max(0.0, span["end_s"] - origin),
            }
            for span in spans
            if span["end_s"] > origin
        ],
    )


def _cut_step(own: Sequence[Scheduled], begun: float, done: float) -> list[dict[str, Any]]:
    """The lane of the step, without gaps."""
    computing = [span for span in own if span.task.resource == COMPUTE and span.task.name != "take"]
    update = computing[-1]
    summed = max((span.end_s for span in own if span.task.name.startswith("buffer ")), default=0.0)
    computed = computing[-2].end_s
    cuts: list[tuple[str, float]] = [("input", computing[0].start_s)]
    cuts += [(span.task.name, span.end_s) for span in computing[:-1]]
    cuts += [("communicate", max(computed, summed)), ("other", update.start_s), ("update", update.end_s)]
    cuts.append(("communicate", done))
    spans: list[dict[str, Any]] = []
    at = begun
    for name, end in cuts:
        if end <= at:
            continue
        if spans and spans[-1]["name"] == name:
            spans[-1]["end_s"] = end
        else:
            spans.append({"lane": "step", "name": name, "step": own[0].task.step, "start_s": at, "end_s": end})
        at = end
    return spans


def _list_beside(own: Iterable[Scheduled]) -> list[dict[str, Any]]:
    lanes = {READER: "input", DECODER: "input", COPY: "input", INTRA: "all-reduce", NIC: "all-reduce"}
    return [
        {
            "lane": lanes[span.task.resource],
            "name": span.task.name,
            "step": span.task.step,
            "start_s": span.start_s,
            "end_s": span.end_s,
        }
        for span in own
        if span.task.resource in lanes
    ]


def write_predicted(folder: Path, case: Case, found: Found, prediction: Prediction, config: RunConfig) -> None:
    """A run's folder with the records of a predicted one, its configuration and the prediction itself."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LockstepError(f"{folder} is there already; give --out a folder that is new or empty.")
    events = list_events(case, found, prediction, config, folder.name, time.time())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / LOG_NAME, "".join(encode(event) + "\n" for event in events))
        write_whole(folder / "config.toml", to_toml(config))
        write_whole(folder / PREDICTION_NAME, to_json([prediction]))
    except OSError as error:
        raise LockstepError(f"Cannot write the predicted run to {folder}: {error.strerror}.") from None
