"""Examples in the README, in the documentation and in docstrings run as they are shown."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml

import lightning_realloc
import lightning_realloc.rewards
from lightning_realloc.report.plan_request import plan_parser
from lightning_realloc.setting_hints import ALGORITHM_HINTS, settings_of
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def examples(page: Path, language: str) -> list[str]:
    """Return the page's blocks of code in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_can_be_parsed_and_import_what_there_is(page: Path) -> None:
    for block in examples(page, "yaml"):
        assert yaml.safe_load(block)
    for block in examples(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_realloc"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def code_spans(page: Path) -> list[str]:
    """Return the code spans of a page outside its blocks of code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_and_settings_exist(page: Path) -> None:
    spans = code_spans(page)
    for name in re.findall(r"\blightning_realloc(?:\.\w+)+", " ".join(spans)):
        pkgutil.resolve_name(name)
    given = [pair for code in (*spans, *examples(page, "python")) for pair in settings_given(code)]
    given += [pair for block in examples(page, "yaml") for pair in settings_configured(yaml.safe_load(block))]
    for name, settings in given:
        known = settings_of_public(name)
        if known is not None:  # names of other libraries are on pages that show the error for them
            assert settings <= known | ALGORITHM_HINTS.keys(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_have_flags_that_exist(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    for command in re.findall(r"^lightning-realloc plan (.*)$", text, flags=re.MULTILINE):
        plan_parser().parse_args(shlex.split(command.partition("#")[0]))


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = re.findall(r"^::: lightning_realloc\.(?:rewards\.)?(\w+)$", pages, flags=re.MULTILINE)
    assert sorted(entries) == sorted({*lightning_realloc.__all__, *lightning_realloc.rewards.__all__})


def test_the_first_example_of_the_readme_is_the_script_in_examples() -> None:
    shown = ast.parse(examples(ROOT / "README.md", "python")[0]).body
    docstring, *script = ast.parse((ROOT / "examples" / "grpo.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert [ast.unparse(node) for node in shown] == [ast.unparse(node) for node in script]


def fit_with_layouts_of_the_readme(folder: str) -> tuple[list[str], str, int]:
    """Run the README's second example, then train what its plan is for; return the layouts, the device, the steps."""
    os.chdir(folder)
    names: dict[str, Any] = {"L": L}
    exec(examples(ROOT / "README.md", "python")[1], names)
    trainer = names["trainer"]
    trainer.fit_loop.max_epochs = 1
    trainer.fit(runs.grpo(), Batches(1))
    layouts = [str(trainer.strategy.plan.layout(call)) for call in names["plan"]["calls"]]
    return layouts, trainer.strategy.root_device.type, trainer.global_step


@pytest.mark.skipif(torch.cuda.is_available(), reason="the example takes the accelerator there is, and four of it")
def test_the_layouts_of_the_readme_train_without_naming_an_accelerator(workers: WorkerPool, tmp_path: Path) -> None:
    everyone = workers.run(fit_with_layouts_of_the_readme, str(tmp_path), init_process_group=False, deadline_s=120.0)
    assert everyone == [(["dp2.tp2@0-3", "tp2@0-1", "fsdp4@0-3"], "cpu", 1)] * 4
