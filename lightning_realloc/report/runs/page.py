"""The report of a run as data, and as one HTML file that needs no network.

`page_data` returns plain values, `render_page` puts them into ``assets/page.html``. The scripts next to it draw
them, and draw again when they are given new values.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from importlib import resources
from typing import Any

from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.events import RunEnded, SaveFailed
from lightning_realloc.report.runs.charts import Json, section
from lightning_realloc.report.runs.comparison import comparison_section, differences_section
from lightning_realloc.report.runs.run_folder import BROKEN_CONTENT, RunFolder
from lightning_realloc.report.runs.sections.learning import learning_section
from lightning_realloc.report.runs.sections.plans import plans_section
from lightning_realloc.report.runs.sections.resources import memory_section, moves_section
from lightning_realloc.report.runs.sections.rollout_samples import generation_section, rollouts_section
from lightning_realloc.report.runs.sections.run_cost import cost_section
from lightning_realloc.report.runs.sections.time_use import time_section

_SCRIPTS = ("charts", "tables", "conversations", "page", "live")
"""Scripts of the page, in order."""

_OF_EVALUATIONS = ("Differences of settings", "Comparison", "Learning")
"""Sections of a run without training."""


def page_data(run: RunFolder, compared: Sequence[RunFolder] = (), *, price: float | None = None) -> Json:
    """Return the content of a run's report, as values of JSON without NaN.

    Args:
        run: Run of the report.
        compared: Further runs, which a section compares with this one.
        price: Price of a device-hour; None: no money is shown.
    """
    problems = [*run.problems, *(f"{one.name}: {problem}" for one in compared for problem in one.problems)]
    builders: dict[str, Callable[[], Json]] = {}
    if compared:
        builders["Differences of settings"] = partial(differences_section, [run, *compared])
        builders["Comparison"] = partial(comparison_section, [run, *compared])
    builders |= {
        "Learning": partial(learning_section, run),
        "Time": partial(time_section, run),
        "Moves of weights": partial(moves_section, run),
        "Memory": partial(memory_section, run),
        "Speculation and rebalancing": partial(generation_section, run),
        "Plans and tuner": partial(plans_section, run),
        "What will it cost": partial(cost_section, run, price),
        "Rollouts": partial(rollouts_section, run),
    }
    if _is_evaluation(run):
        builders = {title: build for title, build in builders.items() if title in _OF_EVALUATIONS}
    sections = [_build(title, build, problems) for title, build in builders.items()]
    facts = _known_facts(run, problems)
    data = {"title": f"Report of {run.name}", "facts": facts, "problems": problems, "sections": sections}
    return {name: finite_values(value) for name, value in data.items()}


def _is_evaluation(run: RunFolder) -> bool:
    """Return whether a run has scores alone: it trained nothing that there could be a record of."""
    return run.record is None and not run.metrics and bool(run.evaluations)


def _build(title: str, build: Callable[[], Json], problems: list[str]) -> Json:
    """Return a section; values that cannot be used are named among the problems."""
    try:
        return build()
    except BROKEN_CONTENT as error:
        problems.append(f"{title} cannot be shown: {type(error).__name__}: {error}")
        return section(title.lower(), title, missing="The record has values that cannot be used; see the problems.")


def _known_facts(run: RunFolder, problems: list[str]) -> list[list[str]]:
    try:
        return _facts(run)
    except BROKEN_CONTENT as error:
        problems.append(f"the start of the run cannot be shown: {type(error).__name__}: {error}")
        return [["log", str(run.log_folder)]]


def _facts(run: RunFolder) -> list[list[str]]:
    """Return names and values of the page's head."""
    if _is_evaluation(run):
        return [["log", str(run.log_folder)], ["record", "scores of an evaluation, without training"]]
    if run.record is None:
        return [["log", str(run.log_folder)], ["record", "none: train with callbacks=[Timeline()]"]]
    started, last = run.record.sessions[0].started, run.record.last
    ended = [event for event in last.events if isinstance(event, RunEnded)]
    step = max([last.started.step, *(one[-1].step for one in last.ranks.values() if one)])
    limit = "" if last.started.max_steps is None else f" of {last.started.max_steps}"
    state = "running or cut off" if not ended else "failed" if ended[-1].error else "ended"
    num_hosts = len(set(last.started.hosts))
    facts = [
        ["algorithm", started.algorithm],
        ["iterations", f"{step}{limit}, {state}"],
        ["ranks", f"{len(last.started.devices)} on {num_hosts} host{'s' * (num_hosts > 1)}"],
        ["devices", ", ".join(sorted(set(last.started.devices)))],
        ["precision", last.started.precision],
        ["weights", ", ".join(f"{role} {count:,}" for role, count in last.started.roles.items())],
        ["log", str(run.log_folder)],
    ]
    missing = [event for one in run.record.sessions for event in one.events if isinstance(event, SaveFailed)]
    if missing:
        lines = (f"{one.path} (step {one.step}): {one.error}" for one in missing)
        facts.append(["missing checkpoints", "; ".join(lines)])
    if len(run.record.sessions) > 1:
        steps = ", ".join(str(session.started.step) for session in run.record.sessions[1:])
        facts.append(["sessions", f"{len(run.record.sessions)}, continued after iteration {steps}"])
    return facts


def finite_values(value: Any) -> Any:
    """Return values of JSON with None instead of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [finite_values(one) for one in value]
    if isinstance(value, dict):
        return {str(name): finite_values(one) for name, one in value.items()}
    return value


def render_page(data: Json, *, follow: str | None = None) -> str:
    """Return the HTML of a report; its scripts are allowed by their hash, so that no other script runs.

    Args:
        data: Content of the page.
        follow: Address at which the page asks for newer data; None: it stays as it is.

    Raises:
        ConfigError: if plotly is not installed.
    """
    scripts = {"plotly": _plotly()} | {name: _asset(f"{name}.js") for name in _SCRIPTS}
    parts = {
        "policy": " ".join(_hash(script) for script in scripts.values()),
        "style": _asset("page.css"),
        "data": script_text(data),
        "follow": "" if follow is None else f' data-follow="{escape(follow)}"',
        **scripts,
    }
    pieces = _asset("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def script_text(data: Json) -> str:
    """Return JSON that can stand in a script element: without ``<``, so nothing in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.encode("utf-8", errors="replace").decode()  # half of a surrogate pair cannot be written
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "an HTML report needs plotly, which is not installed; pip install 'lightning-realloc[report]', or give "
            "--format md"
        ) from None
    return str(get_plotlyjs())
