"""The page of a sweep: its tables say something in every column."""

from lockstep.report.page.charts import Numbers
from lockstep.report.page.sweep_page import drop_empty_columns


def test_columns_that_say_nothing_are_left_out() -> None:
    told = Numbers(["cell", "best settings", "top-1, %", "steps to"], [["a", "–", "71.2", "–"], ["b", "–", "–", "–"]])
    assert drop_empty_columns(told) == Numbers(["cell", "top-1, %"], [["a", "71.2"], ["b", "–"]])


def test_a_table_without_rows_keeps_its_heads() -> None:
    told = Numbers(["cell", "trials"], [])
    assert drop_empty_columns(told) == told
