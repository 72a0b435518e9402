"""The report of a run as Markdown: the same sentences, findings and tables as on its page. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_realloc.report.runs.charts import NUMBER, Json, quantity

MAX_ROWS = 30
"""Rows of a table; the page and the JSON have all."""
MAX_CELL_CHARACTERS = 120
"""Longest cell of a table, or message of a conversation; longer ones are cut."""
MAX_CONVERSATIONS = 10
"""Conversations, the newest; the page and the JSON have more."""


def markdown_report(data: Json) -> str:
    """Return the Markdown of a report's content."""
    return "\n".join(_lines(data)).rstrip() + "\n"


def _lines(data: Json) -> Iterator[str]:
    yield f"# {_text(data['title'])}"
    yield ""
    for name, value in data["facts"]:
        yield f"- {name}: {_text(value)}"
    if data["problems"]:
        yield from ("", "## Problems", "", *(f"- {_text(problem)}" for problem in data["problems"]))
    for section in data["sections"]:
        yield from ("", f"## {section['title']}", "")
        yield from _section(section)


def _section(section: Json) -> Iterator[str]:
    for sentence in section["sentences"]:
        yield from (_text(sentence), "")
    if section["missing"]:
        yield from (_text(section["missing"]), "")
    for found in section["findings"]:
        yield f"- **{found['level']}**: {_text(found['text'])} {_text(found['advice'])}"
    if section["findings"]:
        yield ""
    for chart in section["charts"]:
        yield f"- {_text(chart['title'])}: {_text(chart['summary'])}"
    for table in section["tables"]:
        yield from ("", f"### {_text(table['title'])}", "")
        yield from _table(table)
    for talk in section["conversations"][:MAX_CONVERSATIONS]:
        yield from _conversation(talk)
    yield ""


def _conversation(talk: Json) -> Iterator[str]:
    facts = "".join(f", {name.replace('_', ' ')} {_text(value)}" for name, value in talk["facts"])
    yield from ("", f"### Conversation of iteration {talk['step']}, {quantity(talk['seconds'], 's')}{facts}", "")
    for message in talk["messages"]:
        name = _text(f"{message['role']} {message['name'] or ''}")
        thought = f"thinks: {message['thought']}" if message["thought"] else ""
        said = [one for one in (thought, message["text"], *(f"calls {call}" for call in message["calls"])) if one]
        known = (("reward", message.get("reward"), ""), ("in", message.get("seconds"), "s"))
        outcome = "".join(f", {word} {quantity(value, unit)}" for word, value, unit in known if value is not None)
        yield f"- **{name}**{outcome}: {_cell(' | '.join(said))}"
    if talk["failure"] is not None:
        yield f"- **failed**: {_text(talk['failure'])}"


def _table(table: Json) -> Iterator[str]:
    columns = table["columns"]
    yield _row([_cell(column["name"]) for column in columns])
    yield _row(["---:" if column["kind"] == NUMBER else "---" for column in columns])
    for cells in table["rows"][:MAX_ROWS]:
        yield _row([_cell(cell) for cell in cells])
    if len(table["rows"]) > MAX_ROWS:
        yield from ("", f"{len(table['rows']) - MAX_ROWS} further rows: --format json has them.")
    if table["note"]:
        yield from ("", _text(table["note"]))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = _text(value["text"] if isinstance(value, dict) else str(value))
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[:MAX_CELL_CHARACTERS]}…"


def _text(text: str) -> str:
    """Return a text in one line, without HTML, ends of cells, links and control characters of terminals."""
    line = " ".join("".join(one if one.isprintable() or one.isspace() else "\ufffd" for one in text).split())
    for mark, escaped in (("\\", "\\\\"), ("<", "&lt;"), ("|", "\\|"), ("`", "\\`"), ("[", "\\[")):
        line = line.replace(mark, escaped)
    return line
