"""What a plan is true of: other links are another setup, and how long somebody looked is not."""

from lockstep.comm.topology import Link, Topology
from lockstep.engine.setup import _describe_links, _describe_pins
from tests.engine.small import small_config


def test_links_are_told_in_words_that_tell_any_two_apart() -> None:
    inside = Link(2e-6, 5e9)
    ten, one = (Topology(((0, 1), (2, 3)), inside, Link(3e-5, rate)) for rate in (1.25e9, 1.25e8))
    assert _describe_links(ten) == "2 us and 40 Gbit/s inside a node, 30 us and 10 Gbit/s between nodes"
    assert _describe_links(one) == "2 us and 40 Gbit/s inside a node, 30 us and 1 Gbit/s between nodes"
    assert _describe_links(Topology(ten.nodes)) == ""  # guessed


def test_how_long_one_looked_is_no_pin_but_whether_one_looked_is() -> None:
    pins = {tune_s: _describe_pins(small_config("fp32", comm={"tune_s": tune_s})) for tune_s in (0.0, 6.0, 20.0)}
    assert pins[6.0] == pins[20.0] == "lars"
    assert pins[0.0] == "lars, tune_s=0"
    pinned = small_config("fp32", comm={"tune_s": 6.0, "algorithm": "doubling"}, compile="off")
    assert _describe_pins(pinned) == "lars, algorithm=doubling, compile=off"
