"""The page of a sweep: its tables say something in every column."""

from dataclasses import replace

from lockstep.recipes.sweep_file import SweepFile
from lockstep.recipes.trials import Trial
from lockstep.report.page.charts import Numbers
from lockstep.report.page.sweep_page import BATCH, draw_places, drop_empty_columns, list_trials
from lockstep.report.sweep_rows import Place, Row, Spread


def test_columns_that_say_nothing_are_left_out() -> None:
    told = Numbers(["cell", "best settings", "top-1, %", "steps to"], [["a", "–", "71.2", "–"], ["b", "–", "–", "–"]])
    assert drop_empty_columns(told) == Numbers(["cell", "top-1, %"], [["a", "71.2"], ["b", "–"]])


def test_a_table_without_rows_keeps_its_heads() -> None:
    told = Numbers(["cell", "trials"], [])
    assert drop_empty_columns(told) == told


def test_a_sweep_without_an_average_says_its_accuracy_once() -> None:
    trial = Trial("a", (), 0, 0, (), (), "1", "a")
    plain = Row(trial, "finished", top1=0.5, average_top1=0.5)
    assert "of the average, %" not in drop_empty_columns(list_trials([plain], 0.4)).heads
    averaged = replace(plain, average_top1=0.6)
    assert {"steps to 40 %", "seconds to 40 %"} <= set(list_trials([plain], 0.4).heads)
    assert "of the average, %" in drop_empty_columns(list_trials([plain, averaged], 0.4)).heads


def place(batch: int, steps: list[float | None]) -> Place:
    """A cell at one batch, by the steps that each of its seeds took to the target."""
    spread = Spread.of(steps)
    return Place("a", ((BATCH, batch),), 1, 0, None, False, (0,), *[spread] * 8)


def test_steps_far_apart_have_an_axis_that_names_whole_numbers_and_one_seed_has_no_spread() -> None:
    """Plotly's own ticks of such an axis are 2 for 20 and 3 for 30."""
    sweep = SweepFile(recipe="quickstart", target=0.3, grid={BATCH: [32, 128]})
    places = [place(32, [32.0]), place(128, [4.0])]
    chart = draw_places(sweep, places, "steps_to")
    assert chart is not None
    assert chart.layout["yaxis"]["ticktext"] == ["2", "5", "10", "20", "50"]
    assert "a single seed" in chart.note
    several = draw_places(sweep, [place(32, [32.0, 64.0]), place(128, [4.0, 8.0])], "steps_to")
    assert several is not None
    assert "one standard deviation" in several.note


def test_a_trial_has_its_place_in_the_words_of_the_table_above() -> None:
    trial = Trial("a", (("optim.lr", 1.0), ("train.global_batch", 1024), ("data.flip", True)), 0, 0, (), (), "1", "a")
    (row,) = list_trials([Row(trial, "finished", top1=0.5)], None).rows
    assert row[0] == "a, lr 1, global_batch 1,024, flip true, trial 0"
