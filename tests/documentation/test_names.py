"""Names, settings and commands in the README and in the documentation exist."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterable, Iterator
from pydoc import locate
from typing import Any, get_args

import lightning as L
import pytest
import yaml

import lightning_realloc
import lightning_realloc.rewards
from lightning_realloc.algorithms.losses.advantages import ADVANTAGES
from lightning_realloc.algorithms.losses.loss_reduction import LossAverage
from lightning_realloc.algorithms.losses.policy_losses import PolicyLossName, RatioLevel
from lightning_realloc.commands.short_run import COMMANDS, short_parser, split_arguments
from lightning_realloc.report.plan_flags import plan_parser
from lightning_realloc.setting_hints import ALGORITHM_HINTS, settings_of
from tests.documentation.pages import PAGES, ROOT, examples
from tests.every_algorithm import ALGORITHMS


def code_spans(page: str) -> list[str]:
    """Return the code spans of a page outside its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def settings_given(code: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the keywords of every call of a plain name; nothing for text that is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:
        return
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, {word.arg for word in node.keywords if word.arg}


def settings_configured(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield the class and the settings of every ``class_path`` with ``init_args`` in a configuration."""
    if isinstance(node, dict) and "class_path" in node:
        yield node["class_path"].rpartition(".")[2], set(node.get("init_args", {}))
    for part in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from settings_configured(part)


def settings_of_public(name: str) -> frozenset[str] | None:
    """Return the settings of a public class or function; None for other names."""
    for module in (lightning_realloc, lightning_realloc.rewards, L):
        if name in module.__all__:
            found = getattr(module, name)
            return settings_of(found) if isinstance(found, type) else frozenset(inspect.signature(found).parameters)
    return None


@pytest.mark.parametrize("page", PAGES)
def test_names_and_settings_exist(page: str) -> None:
    spans = code_spans(page)
    for name in re.findall(r"\blightning_realloc(?:\.\w+)+", " ".join(spans)):
        pkgutil.resolve_name(name)
    code = [*spans, *(block.text for block in examples(page, "python"))]
    given = [pair for part in code for pair in settings_given(part)]
    given += [pair for block in examples(page, "yaml") for pair in settings_configured(yaml.safe_load(block.text))]
    for name, settings in given:
        known = settings_of_public(name)
        if known is not None:  # other libraries' names are on pages that show the error for them
            assert settings <= known | ALGORITHM_HINTS.keys(), name


def test_the_calls_of_every_algorithm_are_listed() -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = [row.split("|")[1:-1] for row in page.splitlines() if ".train`" in row and row.startswith("|")]
    roles = ("actor", "critic", "reference", "teacher")
    with_settings = {"match", "actor.infer", "reference.infer", "reward.infer"}
    listed = set()
    for names, *cells in rows:
        calls = set(re.findall(r"`([\w.]+)`", " ".join(cells)))
        for algorithm in map(pkgutil.resolve_name, (f"lightning_realloc:{n}" for n in re.findall(r"\w+", names))):
            listed.add(algorithm)
            declared = {call.name for call in algorithm.calls_for(roles)}
            assert calls <= declared, algorithm
            assert declared <= calls | with_settings, algorithm
    assert listed == set(ALGORITHMS)


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(page: str) -> None:
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for command in re.findall(r"^lightning-realloc plan (.*)$", text, flags=re.MULTILINE):
        plan_parser().parse_args(shlex.split(command.partition("#")[0]))
    for name, command in re.findall(rf"^lightning-realloc ({'|'.join(COMMANDS)}) (.*)$", text, flags=re.MULTILINE):
        short, _ = split_arguments(shlex.split(command.partition("#")[0]))
        short_parser(name).parse(short)


def test_the_reference_can_be_read_before_it_is_built() -> None:
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text()
        rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
        paths = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
        assert [name for name, _ in rows] == [path.rpartition(".")[2] for path in paths], page.name
        for path, (name, purpose) in zip(paths, rows, strict=True):
            described = inspect.getdoc(locate(path)) if name != "RewardFunction" else None  # a type without its own
            assert described is None or described.splitlines()[0].replace("``", "`") == purpose, path


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: lightning_realloc\.(?:rewards\.)?(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(entries) == sorted({*lightning_realloc.__all__, *lightning_realloc.rewards.__all__})


@pytest.mark.parametrize(
    ("page", "setting", "names"),
    [
        ("policy-loss", "policy_loss", get_args(PolicyLossName)), ("policy-loss", "ratio_level", get_args(RatioLevel)),
        ("policy-loss", "loss_average", get_args(LossAverage)), ("online-algorithms", "advantages", ADVANTAGES),
    ],
)  # fmt: skip
def test_the_tables_of_settings_have_a_row_for_every_name(page: str, setting: str, names: Iterable[str]) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    (table,) = re.findall(rf"^\| `{setting}` \|.*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert set(re.findall(r'^\| `"(\w+)"` \|', table, flags=re.MULTILINE)) == set(names)
