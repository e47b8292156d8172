"""What a run says of its input: which samples could not be read, and how batches are made (step 10 on the walk)."""

from dataclasses import asdict

from lockstep.comm.world import World
from lockstep.data.pipeline import Pipeline
from lockstep.errors import SharedError
from lockstep.events import InputChosen, Notice, Sink


class InputReport:
    """Says each thing once."""

    def __init__(self, world: World, sink: Sink) -> None:
        self._world = world
        self._sink = sink
        self._named: set[str] = set()
        self._choice = ""

    def name_bad(self, pipeline: Pipeline, consequence: str) -> int:
        """Name the samples that any rank could not read, and stop if they are too many; returns how many they are.

        Every rank must call it: a rank by itself stops only for what it met itself.
        """
        bad: dict[int, str] = {}
        for rows in self._world.gather_values(list(dict(pipeline.bad).items())):
            bad |= {int(sample): str(text) for sample, text in rows}
        for sample in sorted(bad):
            if bad[sample] not in self._named:
                self._sink.emit(Notice(level="warning", text=f"{bad[sample]}; {consequence}."))
        self._named |= set(bad.values())
        if len(bad) > pipeline.reader.max_bad:
            raise SharedError(pipeline.reader.describe_excess(bad))
        return len(bad)

    def say_choice(self, pipeline: Pipeline) -> None:
        """Tell how this rank's batches are made, when that has changed."""
        text = pipeline.describe()
        if text == self._choice:
            return
        self._choice = text
        crew = pipeline.crew()
        self._sink.emit(InputChosen(prefetch_batches=pipeline.depth, text=text, **asdict(crew)))
