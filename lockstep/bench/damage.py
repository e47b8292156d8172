"""Ways to damage a file: its bytes, its text, or the values it holds. Each follows from a seed. Torch-free."""

import contextlib
import copy
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBERS = (
    *(0, 1, -1, 2, 7, 255, 256, 511, 512, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53 + 1),
    *(2**62, 2**63 - 512, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**31), -(2**63), 10**30, 10**400),
)
FLOATS = (0.5, -0.0, 1e-320, 1e38, 1e308, -1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "x", ".", "..", "../x", "../../etc/passwd", "/etc/passwd", "/dev/zero", "\0", "a\0b", "\ud800", "\udcff"),
    *(
        "1e308ep",
        "-1st",
        "infep",
        "nanst",
        "٣ep",
        "9" * 5000,
        "z" * 5000,
        "\n",
        "\x1b[2J",
        "[red]",
        "[/red]",
        "{}",
        "%s",
    ),
)
# Pieces of text that parsers stumble over, in TOML or in JSON.
PIECES = (
    *("9" * 5000, "-" + "9" * 5000, "0x" + "f" * 5000, "1e999999", "-0", "1e-400", "nan", "inf", "NaN", "Infinity"),
    *("[" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 5000, "{a=" * 3000 + "1" + "}" * 3000, "a." * 5000 + "a = 1\n"),
    *("true", "null", '""', "{}", "[]", "1979-05-27", "1979-05-27T07:32:00Z", '"\\ud800"', "\0", "\ufeff", "\n", "\r"),
    *("[x]\n", "[[x]]\n", "'''", '"""', "\\", "#", ",", "=", ":", "\u2028", "\x1b[2J"),
)
DEPTH = 400  # of nested lists; more than any reader should follow, few enough for a writer


def damage_bytes(data: bytes, chance: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """The bytes, changed in one to four places."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        chance.choice(BYTE_CHANGES)(changed, chance, others)
        if not changed:
            break
    return bytes(changed)


def _flip(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    for _ in range(chance.choice([1, 1, 2, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    # Near the start as often as anywhere: that is where sizes and kinds are.
    most = chance.choice([len(data), min(len(data), 700)])
    for _ in range(chance.choice([1, 2, 4])):
        data[chance.randrange(most)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])


def _cut(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    del data[chance.choice([0, 1, chance.randrange(len(data)), len(data) - 1]) :]


def _drop(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    start = chance.randrange(len(data))
    del data[start : start + chance.choice([1, 2, 4, 50, 512])]


def _double(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    start = chance.randrange(len(data))
    data[start:start] = data[start : start + chance.choice([1, 20, 400])] * chance.choice([1, 1, 50])


def _number(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    """An absurd number where another may have been."""
    width = chance.choice([1, 2, 4, 8])
    start = chance.randrange(len(data))
    number = chance.choice(NUMBERS) % (1 << 8 * width)
    data[start : start + width] = number.to_bytes(width, chance.choice(["little", "big"]))


def _insert(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    start = chance.randrange(len(data) + 1)
    data[start:start] = chance.choice([chance.randbytes(chance.choice([1, 16, 300])), bytes(4096), b"\xff" * 4096])


def _splice(data: bytearray, chance: random.Random, others: Sequence[bytes]) -> None:
    """The beginning of this one, the end of another."""
    other = chance.choice(others) if others else bytes(data)
    del data[chance.randrange(len(data)) :]
    data += other[chance.randrange(len(other)) if other else 0 :]


ByteChange = Callable[[bytearray, random.Random, Sequence[bytes]], None]
BYTE_CHANGES: tuple[ByteChange, ...] = (_flip, _flip, _set, _set, _cut, _drop, _double, _number, _insert, _splice)


def damage_text(text: str, chance: random.Random, others: Sequence[str] = ()) -> str:
    """The text with pieces cut out, doubled, moved or replaced, and its numbers made absurd."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        text = chance.choice(TEXT_CHANGES)(text, chance, others)
    return text


def _replace_piece(text: str, chance: random.Random, others: Sequence[str]) -> str:
    first, last = _choose_span(text, chance, 30)
    piece = chance.choice(["", text[first:last] * 2, *PIECES, chr(chance.randrange(1, 0xD800))])
    return text[:first] + piece + text[last:]


def _replace_number(text: str, chance: random.Random, others: Sequence[str]) -> str:
    found = list(re.finditer(r"-?\d+(?:\.\d+)?", text))
    if not found:
        return text
    place = chance.choice(found)
    with_digits = [number for number in NUMBERS if abs(number) < 10**100]
    number = str(chance.choice([*with_digits, *FLOATS, "9" * 5000, "0x" + "f" * 5000, f"{place[0]}0", f"-{place[0]}"]))
    return text[: place.start()] + number + text[place.end() :]


def _replace_value(text: str, chance: random.Random, others: Sequence[str]) -> str:
    """What comes after a sign of equality or a colon, up to the end of the line."""
    found = list(re.finditer(r"[=:] *([^\n,]*)", text))
    if not found:
        return text
    place = chance.choice(found)
    return text[: place.start(1)] + chance.choice(PIECES) + text[place.end(1) :]


def _move_line(text: str, chance: random.Random, others: Sequence[str]) -> str:
    """A line twice, elsewhere, or not at all."""
    lines = text.split("\n")
    line = chance.choice(lines)
    if chance.random() < 0.5:
        lines.remove(line)
    for _ in range(chance.choice([0, 1, 1, 2000])):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return "\n".join(lines)


def _splice_text(text: str, chance: random.Random, others: Sequence[str]) -> str:
    other = chance.choice(others) if others else text
    return text[: chance.randrange(len(text) + 1)] + other[chance.randrange(len(other) + 1) :]


def _choose_span(text: str, chance: random.Random, most: int) -> tuple[int, int]:
    first = chance.randrange(len(text) + 1)
    return first, min(len(text), first + chance.randrange(most + 1))


TextChange = Callable[[str, random.Random, Sequence[str]], str]
TEXT_CHANGES: tuple[TextChange, ...] = (
    _replace_piece, _replace_number, _replace_number, _replace_value, _move_line, _splice_text,
)  # fmt: skip


def damage_tree(tree: Any, chance: random.Random) -> None:
    """Put something absurd in one to three places of a tree of lists and tables."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        if not isinstance(tree, dict | list) or not tree:
            return
        with contextlib.suppress(RecursionError):  # what is that deep is damaged enough
            _damage_place(tree, chance)


def _damage_place(tree: Any, chance: random.Random) -> None:
    top = tree
    while True:
        key = chance.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        if not isinstance(tree[key], dict | list) or not tree[key] or chance.random() < 0.15:
            break
        tree = tree[key]
    change = chance.randrange(10)
    if change == 0:
        del tree[key]
    elif change == 1 and isinstance(tree, list):
        tree[key:key] = [tree[key]] * chance.choice([1, 1000])
    elif change == 1:
        tree[chance.choice(TEXTS[:12])] = tree[key]
    elif change == 2:
        other, place = chance.choice(list_places(top))
        tree[key] = copy.deepcopy(other[place])  # what belongs elsewhere
    elif change == 3:
        for _ in range(DEPTH):
            tree[key] = [tree[key]]
    elif type(tree[key]) in (int, float) and change < 8:
        tree[key] = chance.choice([*NUMBERS, *FLOATS, tree[key] + 1, tree[key] - 1, -tree[key], tree[key] * 2])
    else:
        tree[key] = chance.choice([*NUMBERS, *FLOATS, *TEXTS, True, False, None, [], {}, [[]], [1] * 1000, {"": {}}])


def list_places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else []
    return [(tree, key) for key in keys] + [place for key in keys for place in list_places(tree[key])]


def damage_head(data: bytes, chance: random.Random) -> bytes:
    """Numbers out of nowhere at the beginning, or at the end, where sizes, places and counts are."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4])):
        near = chance.randrange(4, min(len(data) - 4, 64))
        at = chance.choice([near, len(data) - near])
        number = chance.choice([0, 1, 0x7FFF, 0xFFFF, 1 << 20, 0x7FFF_FFFF, 0xFFFF_FFFF, chance.randrange(1 << 32)])
        width = chance.choice([1, 2, 4])
        changed[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, chance.choice(["little", "big"]))
    return bytes(changed[: len(data)])
