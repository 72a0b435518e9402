"""Imports of the package inside functions of the benchmarks, which no linter follows."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_imports_names_that_exist(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("lightning_realloc"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                is_module = (
                    importlib.util.find_spec(f"{node.module}.{alias.name}") if hasattr(module, "__path__") else None
                )
                assert is_module or hasattr(module, alias.name), f"{path.name}:{node.lineno}: {ast.unparse(node)}"
