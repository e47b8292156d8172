"""Marks on values in the store: ours are believed, all others are as if they had not come."""

import os

import pytest

from lockstep.comm.seal import MAX_BYTES, SECRET, Seal, make_secret

SEAL = Seal.read({SECRET: "the run's"})


def test_what_was_sealed_opens_under_its_own_key_alone() -> None:
    sealed = SEAL.close("pulse/1", "7 3 2")
    assert SEAL.open("pulse/1", sealed) == "7 3 2"
    assert SEAL.open("pulse/2", sealed) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"7 3 2",
        b"- 7 3 2",
        Seal("another run's").close("k", "7 3 2"),
        Seal().close("k", "7 3 2"),
        SEAL.close("k", "7 3 2") + b"1",
        SEAL.close("k", "7" * MAX_BYTES),
        b"\xff" * 64 + b" 7 3 2",
    ],
)
def test_what_another_wrote_does_not_open(data: bytes) -> None:
    assert SEAL.open("k", data) is None


def test_without_a_secret_values_go_unmarked() -> None:
    assert Seal.read({}).open("k", Seal().close("k", "7 3 2")) == "7 3 2"
    assert Seal().open("k", SEAL.close("k", "7 3 2")) is None


def test_a_secret_may_be_any_bytes() -> None:
    """As `LOCKSTEP_SECRET=$(head -c 32 /dev/urandom)` has it in the environment."""
    secret = os.fsdecode(bytes(range(128, 160)))
    assert Seal.read({SECRET: secret}).open("k", Seal(secret).close("k", "7 3 2")) == "7 3 2"
    assert Seal("another").open("k", Seal(secret).close("k", "7 3 2")) is None


def test_every_run_has_a_secret_of_its_own() -> None:
    assert make_secret() != make_secret()
    assert len(make_secret()) == 64
