"""The norms of a network and the bytes of their passes, against the published architecture and counts by hand."""

import pytest

from lockstep.bench.norm_shapes import ADD, ADD_NORM, POOL, RELU, Use, find_norms, list_passes


def test_resnet50_has_its_53_norms() -> None:
    found = find_norms("resnet50", 2)
    assert sum(use.num_norms * count for use, count in found.items()) == 53
    kinds = {
        kind: sum(count for use, count in found.items() if use.kind == kind) for kind in (RELU, ADD, ADD_NORM, POOL)
    }
    assert kinds == {RELU: 2 * 16, ADD: 12, ADD_NORM: 4, POOL: 1}
    assert {use.batch for use in found} == {2}


def test_resnet50s_shapes_are_the_published_ones() -> None:
    shapes = {(use.kind, use.channels, use.side): 0 for use in find_norms("resnet50", 1)}
    for use, count in find_norms("resnet50", 1).items():
        shapes[use.kind, use.channels, use.side] += count
    blocks = {256: 3, 512: 4, 1024: 6, 2048: 3}
    assert {key: shapes[key] for key in shapes if key[0] in (ADD, ADD_NORM)} == {
        key: value
        for (channels, count), side in zip(blocks.items(), (56, 28, 14, 7), strict=True)
        for key, value in (((ADD_NORM, channels, side), 1), ((ADD, channels, side), count - 1))
    }
    # The first block of a stage still has the last one's side before its 3 × 3 convolution.
    assert (RELU, 128, 56) in shapes
    assert shapes[RELU, 128, 28] == 2 * 4 - 1


def test_two_gradients_come_back_wherever_a_shortcut_begins() -> None:
    found = find_norms("resnet50", 1)
    assert Use(POOL, 1, 64, 112, padding=1, num_gradients=2) in found
    alone = [(use, count) for use, count in found.items() if use.kind in (ADD, ADD_NORM) and use.num_gradients == 1]
    assert alone == [(Use(ADD, 1, 2048, 7), 1)]  # behind the last block only the classifier follows


def test_alexnets_pools_have_no_border_and_one_gradient() -> None:
    assert find_norms("alexnet", 4) == {
        Use(POOL, 4, 96, 55): 1,
        Use(POOL, 4, 256, 27): 1,
        Use(RELU, 4, 384, 13): 2,
        Use(POOL, 4, 256, 13): 1,
    }


N = 2 * 3 * 8 * 8  # values before the norm
P = 2 * 3 * 4 * 4  # behind a pool with a border


@pytest.mark.parametrize(
    ("use", "forward", "backward"),
    [
        # x for the statistics; x, y. Then dy, x for the sums; dy, x, dx.
        (Use(RELU, 2, 3, 8), 2 * (N + 2 * N), 2 * (2 * N + 3 * N)),
        # x; x, shortcut, y. Then dy, x, y, g; g, x, dx.
        (Use(ADD, 2, 3, 8), 2 * (N + 3 * N), 2 * (4 * N + 3 * N)),
        (Use(ADD, 2, 3, 8, num_gradients=2), 2 * (N + 3 * N), 2 * (5 * N + 3 * N)),
        # The shortcut's own statistics; the shortcut besides for its sums, and besides with its own gradient.
        (Use(ADD_NORM, 2, 3, 8, num_gradients=2), 2 * (2 * N + 3 * N), 2 * (5 * N + N + 3 * N + 2 * N)),
        # x; x, pooled, winner. Then dy, winner, x; dy, winner, x, dx.
        (Use(POOL, 2, 3, 8, padding=1), 2 * (N + N + P) + P, 2 * (P + N + P + 2 * N) + 2 * P),
        (Use(POOL, 2, 3, 8, padding=1, num_gradients=2), 2 * (N + N + P) + P, 2 * (2 * P + N + 2 * P + 2 * N) + 2 * P),
    ],
)
def test_bytes_are_those_of_every_array_once_a_pass(use: Use, forward: int, backward: int) -> None:
    passes = list_passes(use)
    assert sum(part.count_bytes(use) for part in passes if part.is_forward) == forward
    assert sum(part.count_bytes(use) for part in passes if not part.is_forward) == backward


def test_a_pool_without_a_border_is_smaller() -> None:
    assert Use(POOL, 1, 96, 55).pooled_side == 27
    assert Use(POOL, 1, 64, 112, padding=1).pooled_side == 56
