"""The benchmark of a run's instruments: its arithmetic."""

import pytest

from lockstep.bench.instrument_cost import CUTS, LAYERS, OFF, TIMELINE, build_rows


def test_ratios_are_of_turns_side_by_side() -> None:
    times = {
        OFF: [(1.0, 0.5), (2.0, 0.5), (4.0, 0.5)],
        CUTS: [(1.0, 0.5), (2.0, 0.5), (4.0, 0.5)],
        LAYERS: [(1.1, 0.6), (2.2, 0.6), (4.4, 0.6)],
        TIMELINE: [(1.2, 0.5), (2.0, 0.5), (4.0, 0.5)],
    }
    off, cuts, layers, timeline = build_rows(times)
    assert (off.ratio, cuts.ratio, timeline.ratio) == (1.0, 1.0, 1.0)
    assert (layers.ratio, layers.cpu_ratio) == pytest.approx((1.1, 1.2))
    assert layers.cpu_share_of_run == pytest.approx(0.02)  # at a record in ten
    assert (off.step_s, off.cpu_s) == (2.0, 0.5)
