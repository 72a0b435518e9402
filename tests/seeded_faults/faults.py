"""Faults of the trial: one replacement in one file of the package each, listed in ``faults.yaml``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


class FaultError(Exception):
    """A fault that cannot be put into the package as it is, or that keeps the tests from running."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in the package."""

    name: str
    file: str
    """The changed file, from the repository's root."""
    old: str
    """Text that occurs once in the file."""
    new: str
    """Text in its place."""
    wrong: str
    """The consequence for a user."""
    tests: tuple[str, ...]
    """Test files most likely to fail, from the repository's root."""

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> Fault:
        """Return the fault of an entry of ``faults.yaml``."""
        return cls(**(values | {"tests": tuple(values["tests"])}))

    def put_into(self, text: str) -> str:
        """Return the file's text with the fault. Raises FaultError unless the old text occurs exactly once."""
        if (count := text.count(self.old)) != 1:
            raise FaultError(
                f"the old text of {self.name} occurs {count} times in {self.file}, and must occur once; adapt `old` "
                f"and `new` in tests/seeded_faults/faults.yaml to the file:\n{self.old}"
            )
        return text.replace(self.old, self.new)


def load_faults() -> tuple[Fault, ...]:
    """Return all faults, in the file's order."""
    entries = yaml.safe_load(Path(__file__).with_name("faults.yaml").read_text())
    return tuple(map(Fault.from_mapping, entries))
