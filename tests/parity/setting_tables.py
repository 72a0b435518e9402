"""Write the tables of docs/trl-settings.md, openrlhf-settings.md and verl-settings.md.

Hints come from ``setting_hints.yaml``, versions and TRL's trainers from ``known_settings.yaml``. To write them::

    python -m tests.parity.setting_tables
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_realloc.setting_hints import VERL_HINTS, algorithm_topics
from tests.parity.known_settings import known, trainers_of_trl

DOCS = Path(__file__).parents[2] / "docs"
START, END = "<!-- tables: start -->\n", "<!-- tables: end -->"
OPENRLHF, EARLIER_OPENRLHF = "OpenRLHF", "Earlier flags of OpenRLHF"
"""Topics of OpenRLHF's flags, which have a page of their own; the earlier ones are in errors alone."""
PAGES = {"trl-settings.md": "trl", "openrlhf-settings.md": "openrlhf", "verl-settings.md": "verl"}
"""Page -> library."""
_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_CODE = re.compile(
    r"`[^`]*`"  # already marked
    rf"|(?:\w+=)?[\w.]+{_ARGUMENTS}(?:\.\w+{_ARGUMENTS})?"  # a call
    r"|\b\w+=(?:\[[^]]*\]|\{[^}]*\}|'[^']*'|\w+)?"  # a keyword
    r"|\b\w+: (?:true\b|\[[^]]*\])|(?<=module's )\w+|'[^' ]+'"
    r"|\b[a-zA-Z0-9]+(?:_[a-zA-Z0-9]+)+\b|\b[A-Z][a-zA-Z]*[a-z][A-Z]\w+\b"  # snake case, camel case
    r"|\b(?:actor|critic|reference|reward)\.\w+|\bmodel\.\*"
    r"|\b(?:fsdp|dp)\d+(?:\.(?:fsdp|cp|tp)\d+)?(?:@\d+-\d+)?\b"
)
_PLAIN = frozenset({"DistributedDataParallel"})


def topics_of_trl() -> Mapping[str, Mapping[str, str]]:
    """Return the hints for TRL's settings by topic."""
    return {topic: hints for topic, hints in algorithm_topics().items() if topic not in (OPENRLHF, EARLIER_OPENRLHF)}


def tables(page: str) -> str:
    """Return the tables of a page, with the version that they are about."""
    library = PAGES[page]
    lines = [f"Version {known()[library]['version']}.", ""]
    if library == "openrlhf":
        lines += _table("OpenRLHF", {f"--{flag}": hint for flag, hint in algorithm_topics()[OPENRLHF].items()})
    elif library == "verl":
        lines += _table("verl", VERL_HINTS)
    else:
        for topic, hints in topics_of_trl().items():
            lines += [f"### {topic}", *_table("TRL", hints, trainers_of_trl()), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(library: str, hints: Mapping[str, str], trainers: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the lines of a table; without a column of trainers where no setting has one."""
    column = trainers if trainers and not trainers.keys().isdisjoint(hints) else None
    yield f"| {library} | trainer | here |" if column else f"| {library} | here |"
    yield "|---|---|---|" if column else "|---|---|"
    for key, hint in hints.items():
        yield f"| {' | '.join([f'`{key}`', *([column.get(key, '')] if column else []), _marked(hint)])} |"


def _marked(hint: str) -> str:
    """Return the hint with its names as code."""

    def mark(found: re.Match[str]) -> str:
        text = found.group()
        return text if text.startswith("`") or text in _PLAIN else f"`{text}`"

    return _CODE.sub(mark, hint)


def page_with_tables(page: str) -> str:
    """Return a page with new tables."""
    before, _, rest = (DOCS / page).read_text().partition(START)
    return f"{before}{START}{tables(page)}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page_with_tables(name))
