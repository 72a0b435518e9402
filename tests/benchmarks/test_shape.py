"""Metrics of the code's shape on a small package, and the check against limits."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks import shape

SOURCES = {
    "__init__.py": '"""Nothing."""\n',
    "errors.py": '"""Which errors are there?"""\n\n\nclass Broken(Exception):\n    """Of all."""\n',
    "generation/__init__.py": "",
    "generation/loop/__init__.py": "",
    "generation/loop/run.py": (
        '"""Run, as told."""\n'
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "from lightning_realloc.errors import Broken\n"
        "from lightning_realloc.generation.core import sample\n"
        "if TYPE_CHECKING:\n    from lightning_realloc.strategies.pool import Pool\n"
        "_FEW = 3\n_SIZE: int = 64 * 1_024\n_NAME = 'three'\n_SOME = (1, 2)\n"
        "def late():\n    from lightning_realloc.strategies.pool import Pool\n    return Pool\n"
    ),
    "generation/core/__init__.py": "",
    "generation/core/sample.py": (
        "class Sample:\n"
        '    length: int = 0\n    """Its length: what it is."""\n'
        "    def __init__(self, first, *rest, last=None):\n"
        "        self.first = self._rest = first\n        first.length = 1  # type: ignore\n"
        "    def size(self):\n        '''Return what it has.'''\n"
        "    def _hidden(self): ...\n"
    ),
    "generation/table.py": "#\n" * 401,
    "layout/axes.py": "AXES = ('dp', 'tp')\nIS_OURS = getattr(AXES, 'engine', None) != 'native'\n",
    "strategies/__init__.py": "",
    "strategies/pool.py": (
        "from lightning_realloc.strategies import sample\n"
        "class Pool:\n    def load(self, state: Any, names: dict[str, Any]): return 'dp'\n"
    ),
    "strategies/sample.py": (
        "from lightning_realloc.strategies import pool\nclass Sample: ...\ndef _same(it): return tuple(it.prompt)\n"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, shape.Figure]:
    root = tmp_path_factory.mktemp("repository")
    for name, text in SOURCES.items():
        file = root / "lightning_realloc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "docs").mkdir()
    (root / "docs" / "long.md").write_text("word\n" * 1_201)
    (root / "docs" / "wide.md").write_text("x" * 121 + "\n")
    (root / "docs" / "table.md").write_text("<!-- tables: start -->\n" + "| word\n" * 1_201 + "<!-- tables: end -->\n")
    (root / "README.md").write_text("| " + "x" * 121 + "\n")  # rows of tables may be wider
    return shape.measure(root)


def test_sizes_are_counted(figures: dict[str, shape.Figure]) -> None:
    assert figures["files"][0] == len(SOURCES)
    assert figures["lines"][0] == sum(len(text.splitlines()) for text in SOURCES.values())
    assert figures["long_files"] == (1, ["lightning_realloc/generation/table.py 401"])
    assert figures["files_per_folder"] == (2, ["lightning_realloc/strategies"])  # __init__.py is not counted
    assert figures["function_lines"] == (3, ["lightning_realloc/generation/loop/run.py:12 late"])
    assert figures["constructor_parameters"] == (3, ["lightning_realloc/generation/core/sample.py:1 Sample"])
    assert figures["class_attributes"][0] == 3  # length, first and _rest, but not another object's length
    assert figures["public_methods"][0] == 1
    names = [place.partition(" ")[2] for place in figures["generation_numbers"][1]]
    assert names == ["_FEW = 3", "_SIZE: int = 64 * 1024"]


def test_imports_are_followed_as_python_does_at_start(figures: dict[str, shape.Figure]) -> None:
    run, core = "lightning_realloc.generation.loop.run", "lightning_realloc.generation.core.sample"
    assert figures["step_files"][1] == ["lightning_realloc.errors", core, run]  # imports of the pool do not run
    assert figures["step_files_of_generation"][1] == [core, run]
    assert figures["file_cycles"][1] == ["lightning_realloc.strategies.pool <-> lightning_realloc.strategies.sample"]
    assert figures["folder_cycles"] == (0, [])
    assert figures["file_cycles_with_types"][0] == 1
    single = ["errors.py", "generation/core/sample.py", "strategies/sample.py"]
    assert figures["one_importer"][1] == [f"lightning_realloc/{path}" for path in single]
    assert figures["small_files"][0] == 6


def test_names_that_one_room_knows_alone_are_counted_elsewhere(figures: dict[str, shape.Figure]) -> None:
    assert figures["engine_comparisons"][1] == ["lightning_realloc/layout/axes.py:2"]
    assert figures["prompt_identity"][1] == ["lightning_realloc/strategies/sample.py:3"]
    assert figures["axis_literals"][1] == ["lightning_realloc/strategies/pool.py:3"]
    rooms = dict(place.split() for place in figures["lines"][1])
    assert rooms["layout"] == "2" and rooms["(top)"] == "6"


def test_duplicate_names_are_found(figures: dict[str, shape.Figure]) -> None:
    both = "lightning_realloc/generation/core/sample.py, lightning_realloc/strategies/sample.py"
    assert figures["duplicate_classes"][1] == [f"Sample: {both}"]
    assert figures["duplicate_files"][1] == [f"sample: {both}"]
    assert figures["duplicate_functions"] == (0, [])


def test_prose_and_exceptions_are_counted(figures: dict[str, shape.Figure]) -> None:
    assert figures["docstrings_that_ask"][1] == ["lightning_realloc/errors.py"]
    assert figures["what_in_docstrings"][0] == 2
    assert figures["banned_starts"][0] == 2
    assert figures["banned_words"][1] == ["lightning_realloc/generation/loop/run.py:1 told"]
    assert figures["any_parameters_of_strategies"][0] == 1  # a dict with values of type Any is not counted
    assert (figures["type_ignore"][0], figures["fmt_skip"][0]) == (1, 0)
    assert (figures["long_pages"][1], figures["wide_pages"][1]) == (["docs/long.md"], ["docs/wide.md"])


def test_the_check_fails_only_above_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"files": (3, []), "lines": (10, [])}
    assert shape.check(figures, {"files": 3, "lines": 12}) == 0
    lowered, summary = capsys.readouterr().out.splitlines()
    assert "lower its limit of 12" in lowered and summary == "all 2 figures are within their limits"
    assert shape.check(figures, {"files": 2, "lines": 10}) == 1
    (over,) = capsys.readouterr().out.splitlines()
    assert "files is 3, over its limit of 2" in over


def test_the_check_shows_the_places_of_a_rise_and_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"fmt_skip": (2, ["package/new.py:7 # fmt: skip", "package/old.py:3 # fmt: skip"])}
    assert shape.check(figures, {"fmt_skip": 1}, ["package/new.py"]) == 1
    first, *places = capsys.readouterr().out.splitlines()
    assert "let ruff format it" in first
    assert places == ["  package/new.py:7 # fmt: skip"]


def test_files_that_differ_from_the_last_commit_are_found(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for name in ("same", "changed"):
        (tmp_path / name).write_text("")
    for command in (["init"], ["add", "."], ["commit", "-m", "both"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "changed").write_text("1")
    (tmp_path / "new").write_text("")
    assert sorted(shape.changed_files(tmp_path)) == ["changed", "new"]


def test_every_limit_has_a_hint() -> None:
    assert shape.HINTS.keys() == tomllib.loads(shape.LIMITS.read_text()).keys()


def test_figures_are_printed_listed_and_written(
    figures: dict[str, shape.Figure],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shape, "measure", lambda: figures)  # the check before the tests measures the repository
    assert shape.main(["--json", str(tmp_path / "shape.json")]) == 0
    written = json.loads((tmp_path / "shape.json").read_text())
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(written)
    assert shape.main(["--list", "small_files"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == written["small_files"]["value"]
