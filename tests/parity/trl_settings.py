"""Write the tables of docs/trl-settings.md and openrlhf-settings.md: ``python -m tests.parity.trl_settings``.

Keys and hints come from ``setting_hints.yaml``, and the trainers of a key from TRL's configurations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trl import DPOConfig, GRPOConfig

from lightning_realloc.setting_hints import algorithm_topics

DOCS = Path(__file__).parents[2] / "docs"
START, END = "<!-- tables: start -->\n", "<!-- tables: end -->"
OPENRLHF = "OpenRLHF"
"""Topic of OpenRLHF's flags, which have their own page."""
PAGES = ("trl-settings.md", "openrlhf-settings.md")
_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
_CODE = re.compile(
    r"`[^`]*`"  # already marked
    rf"|(?:\w+=)?[\w.]+{_ARGUMENTS}(?:\.\w+{_ARGUMENTS})?"  # a call
    r"|\b\w+=(?:\[[^]]*\]|\{[^}]*\}|'[^']*'|\w+)?"  # a keyword
    r"|\b\w+: (?:true\b|\[[^]]*\])|(?<=module's )\w+|'[^' ]+'"
    r"|\b[a-zA-Z0-9]+(?:_[a-zA-Z0-9]+)+\b|\b[A-Z][a-zA-Z]*[a-z][A-Z]\w+\b"  # snake case, camel case
    r"|\b(?:actor|critic|reference|reward)\.\w+"
    r"|\b(?:fsdp|dp)\d+(?:\.(?:fsdp|tp)\d+)?(?:@\d+-\d+)?\b"
)
_PLAIN = frozenset({"DistributedDataParallel"})


def keys() -> Mapping[str, str]:
    """Return every key of the two configurations, with its trainer."""
    found: dict[str, list[str]] = {}
    for name, config in (("GRPO", GRPOConfig), ("DPO", DPOConfig)):
        for field in dataclasses.fields(config):
            found.setdefault(field.name, []).append(name)
    return {key: names[0] if len(names) == 1 else "both" for key, names in found.items()}


def tables(page: str) -> str:
    """Return the tables of a page."""
    topics = algorithm_topics()
    if page == "openrlhf-settings.md":
        return "\n".join(_table(OPENRLHF, topics[OPENRLHF])) + "\n"
    trl = {topic: ["", f"### {topic}", *_table("TRL", hints)] for topic, hints in topics.items() if topic != OPENRLHF}
    return "\n".join(line for lines in trl.values() for line in lines).lstrip("\n") + "\n"


def _table(library: str, hints: Mapping[str, str]) -> Iterator[str]:
    trainers = keys()
    has_trainers = library == "TRL" and any(key in trainers for key in hints)
    yield f"| {library} | trainer | here |" if has_trainers else f"| {library} | here |"
    yield "|---|---|---|" if has_trainers else "|---|---|"
    for key, hint in hints.items():
        name = f"`--{key}`" if library == OPENRLHF else f"`{key}`"
        yield f"| {' | '.join([name, *([trainers.get(key, '')] if has_trainers else []), _marked(hint)])} |"


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
