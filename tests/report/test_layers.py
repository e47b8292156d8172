"""Names of layers beside a heat map: short, and never two that look alike."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.report.page.layers import SHORT_NAME, shorten_names

ENDS = ("downsample.0.weight", "downsample.1.weight", "downsample.1.bias")


def test_a_long_name_keeps_its_block_and_its_end() -> None:
    assert shorten_names(["conv1.weight", "layer3.0.downsample.1.bias"]) == ["conv1.weight", "layer3.0…le.1.bias"]


def test_layers_of_the_same_name_in_other_blocks_are_told_apart() -> None:
    names = [f"layer{stage}.0.{end}" for stage in range(1, 5) for end in ENDS]
    shown = shorten_names(names)
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) <= SHORT_NAME + 1


@given(st.lists(st.text("ab.", max_size=50), unique=True, max_size=12))
def test_names_that_differ_are_shown_differently(names: list[str]) -> None:
    assert len(set(shorten_names(names))) == len(names)
