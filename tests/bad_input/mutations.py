"""Random mistakes in valid input: nested mappings, text, rows and files."""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Place = tuple[str | int, ...]
"""Keys and indices from the root of nested input to one value."""

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**63, 10**40, 0.5, -0.5, 1e308, float("nan"), float("inf"),
    "", " ", "1e-3", "nan", "no", "x" * 5_000, "\x00", "\ud800", "../..", "/dev/null", "π",
    [], {}, [[]], [None], {"a": 1}, {"": None}, ["a", 1],
    {"class_path": "os.system"}, {"class_path": "torch.nn.Linear", "init_args": {}}, {"init_args": 3},
)  # fmt: skip
"""Values that do not belong almost anywhere."""


def places(value: Any, start: Place = ()) -> Iterator[Place]:
    """Yield the place of every value within nested mappings and lists."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*start, key)
        yield from places(child, (*start, key))


def mutated(value: Any, rng: random.Random) -> tuple[Any, str]:
    """Return a copy of nested input with one mistake, and its description."""
    root = {"": copy.deepcopy(value)}
    place = rng.choice(list(places(root)))
    owner: Any = root
    for key in place[:-1]:
        owner = owner[key]
    key, name = place[-1], ".".join(map(str, place[1:]))
    mistake = rng.choice(("replace", "replace", "replace", "remove", "rename", "negate", "wrap", "add"))
    if mistake == "remove" and len(place) > 1:
        del owner[key]
        return root[""], f"without {name}"
    if mistake == "rename" and isinstance(owner, dict) and isinstance(key, str) and key:
        new = misspelled(key, rng)
        owner[new] = owner.pop(key)
        return root[""], f"{name} named {new!r}"
    if mistake == "negate" and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
        owner[key] = -owner[key]
        return root[""], f"{name}={owner[key]!r}"
    if mistake == "wrap":
        owner[key] = rng.choice(([owner[key]], {"value": owner[key]}, str(owner[key])))
        return root[""], f"{name} wrapped"
    if mistake == "add" and isinstance(owner[key], dict):
        new, odd = misspelled("option", rng), rng.choice(ODD_VALUES)
        owner[key][new] = odd
        return root[""], f"{name}.{new}={odd!r}"
    owner[key] = rng.choice(ODD_VALUES)
    return root.get(""), f"{name}={owner[key]!r}"[:120]


def misspelled(text: str, rng: random.Random) -> str:
    """Return text with one character dropped, doubled, swapped or replaced."""
    if not text:
        return rng.choice(string.printable)
    at = rng.randrange(len(text))
    other = rng.choice(string.printable)
    changes: tuple[Callable[[], str], ...] = (
        lambda: text[:at] + text[at + 1 :],
        lambda: text[: at + 1] + text[at:],
        lambda: text[:at] + other + text[at + 1 :],
        lambda: text[:at] + other + text[at:],
        lambda: text[at:] + text[:at],
    )
    return rng.choice(changes)()


def damaged(file: Path, rng: random.Random) -> str:
    """Damage a file in place, and return the description."""
    content = bytearray(file.read_bytes())
    kind = rng.choice(("truncate", "flip", "zero", "empty", "remove", "text", "folder"))
    at = rng.randrange(max(1, len(content)))
    if kind == "truncate":
        file.write_bytes(content[:at])
    elif kind == "flip" and content:
        content[at] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    elif kind == "zero":
        content[at : at + 512] = bytes(len(content[at : at + 512]))
        file.write_bytes(content)
    elif kind == "text":
        file.write_text(rng.choice(("{}", "[]", "null", '{"a": 1}', "<html></html>", "version https://git-lfs")))
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "remove":
        file.unlink()
    else:
        file.write_bytes(b"")
    return f"{file.name}: {kind} at {at}"
