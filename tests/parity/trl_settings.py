"""Write the tables of docs/coming-from-trl.md: ``python -m tests.parity.trl_settings``.

The keys are those of TRL's ``GRPOConfig`` and ``DPOConfig``, the answers those of ``setting_hints.yaml``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trl import DPOConfig, GRPOConfig

from lightning_realloc.setting_hints import algorithm_topics

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-trl.md"
START, END = "<!-- tables: start -->\n", "<!-- tables: end -->"
OTHER = frozenset({"OpenRLHF"})
"""Topics of other libraries."""
_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_CODE = re.compile(
    r"`[^`]*`"  # marked already
    rf"|(?:\w+=)?[\w.]+{_ARGUMENTS}(?:\.\w+{_ARGUMENTS})?"  # a call
    r"|\b\w+=(?:\[[^]]*\]|'[^']*'|\w+)?"  # a keyword
    r"|\b\w+: true|(?<=module's )\w+|'[^' ]+'"
    r"|\b[a-zA-Z0-9]+(?:_[a-zA-Z0-9]+)+\b|\b[A-Z][a-zA-Z]*[a-z][A-Z]\w+\b"  # snake case, camel case
    r"|\bactor\.\w+|\b(?:fsdp|dp)\d+(?:\.tp\d+)?\b"
)
_PLAIN = frozenset({"DistributedDataParallel"})


def keys() -> Mapping[str, str]:
    """Return every key of the two configurations, with the trainer that has it."""
    found: dict[str, list[str]] = {}
    for name, config in (("GRPO", GRPOConfig), ("DPO", DPOConfig)):
        for field in dataclasses.fields(config):
            found.setdefault(field.name, []).append(name)
    return {key: names[0] if len(names) == 1 else "both" for key, names in found.items()}


def tables() -> str:
    """Return the tables of all topics."""
    topics = algorithm_topics().items()
    return "\n".join(line for topic, hints in topics if topic not in OTHER for line in _table(topic, hints))


def _table(topic: str, hints: Mapping[str, str]) -> Iterator[str]:
    trainers = keys()
    has_trainers = any(key in trainers for key in hints)
    yield f"### {topic}"
    yield "| TRL | trainer | here |" if has_trainers else "| TRL | here |"
    yield "|---|---|---|" if has_trainers else "|---|---|"
    for key, hint in hints.items():
        cells = [f"`{key}`", *([trainers.get(key, "")] if has_trainers else []), _marked(hint)]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _marked(hint: str) -> str:
    """Return the hint with its names as code."""

    def mark(found: re.Match[str]) -> str:
        text = found.group()
        return text if text.startswith("`") or text in _PLAIN else f"`{text}`"

    return _CODE.sub(mark, hint)


def page_with_tables(page: str) -> str:
    """Return the page with its tables written anew."""
    before, _, rest = page.partition(START)
    return f"{before}{START}{tables()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
