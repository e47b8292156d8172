from lockstep.comm.straggler import RankTimes, find_straggler, typical_times


def test_even_ranks_have_no_straggler() -> None:
    times = [RankTimes(0.001, 0.1), RankTimes(0.001, 0.104), RankTimes(0.002, 0.099)]
    assert find_straggler(times, step_s=0.12) is None


def test_a_rank_that_computes_longer_is_named_with_its_cost() -> None:
    times = [RankTimes(0.0, 0.1), RankTimes(0.0, 0.1), RankTimes(0.0, 0.2), RankTimes(0.0, 0.1)]
    straggler = find_straggler(times, step_s=0.21, node_of=[0, 0, 1, 1])
    assert straggler is not None
    assert (straggler.who, straggler.reason) == ("rank 2", "compute")
    assert straggler.text == "Rank 2 (node 1) holds the others up by 100 ms a step: compute."


def test_a_rank_that_waits_for_input_is_told_from_one_that_computes() -> None:
    times = [RankTimes(0.3, 0.1), RankTimes(0.0, 0.15)]
    straggler = find_straggler(times, step_s=0.4)
    assert straggler is not None
    assert (straggler.who, straggler.reason) == ("rank 0", "input")


def test_a_slow_link_is_named_when_no_rank_is_slow() -> None:
    times = [RankTimes(0.0, 0.1)] * 4
    straggler = find_straggler(times, step_s=1.0, links=[100e6, 95e6, 9e6, 110e6])
    assert straggler is not None
    assert (straggler.who, straggler.reason) == ("node 2", "network")
    assert "9.0 MB/s" in straggler.text


def test_links_within_a_factor_of_two_are_alike() -> None:
    assert find_straggler([RankTimes(0.0, 0.1)] * 3, 1.0, links=[100e6, 60e6, 110e6]) is None


def test_the_greater_cost_is_named() -> None:
    times = [RankTimes(0.0, 0.1), RankTimes(0.0, 0.3), RankTimes(0.0, 0.1)]
    links = [100e6, 100e6, 10e6]  # a message of 1 MB costs 2 x 90 ms more on the slow one
    assert find_straggler(times, 1.0, links, num_bytes=1e6).reason == "compute"  # type: ignore[union-attr]
    assert find_straggler(times, 1.0, links, num_bytes=2e6).reason == "network"  # type: ignore[union-attr]


def test_one_hiccup_makes_no_straggler() -> None:
    times = [RankTimes(0.0, 0.1), RankTimes(0.01, 0.12), RankTimes(0.02, 5.0)]
    assert typical_times(times) == RankTimes(0.01, 0.12)
