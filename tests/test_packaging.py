"""Imports of the pure packages, public names, contents of the wheel, and pinned dependencies."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

import lightning_realloc
from lightning_realloc.lazy_names import FORMER_NAMES, public_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_realloc"
REPORT_ASSETS = ("charts.js", "live.js", "page.css", "page.html", "page.js", "tables.js")


@pytest.fixture(scope="module")
def nodes() -> Mapping[Path, Sequence[ast.AST]]:
    """Imports, calls and attributes in every file of the package, parsed once."""
    kinds = (ast.Import, ast.ImportFrom, ast.Call, ast.Attribute)
    return {
        file: [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds)]
        for file in sorted(PACKAGE.rglob("*.py"))
    }


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the top-level names of all modules that a file imports."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(str(node.module))
    return {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("package", ["layout", "realloc"])
def test_the_pure_packages_import_only_the_standard_library(
    package: str, nodes: Mapping[Path, Sequence[ast.AST]]
) -> None:
    files = [file for file in nodes if PACKAGE / package in file.parents]
    assert files
    for file in files:
        foreign = _imports(nodes[file]) - sys.stdlib_module_names - {"lightning_realloc"}
        assert not foreign, f"{file.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize("package", ["", ".algorithms", ".callbacks", ".rewards"])
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(f"lightning_realloc{package}")
    homes = public_names(module.__name__)

    assert len(homes) > 10 and list(homes) == module.__all__
    for name, home in homes.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in dir(module)
    with pytest.raises(AttributeError, match="Reallok"):
        _ = module.Reallok


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_former_name_is_answered_with_one_that_exists(name: str) -> None:
    text = f"module 'lightning_realloc' has no attribute '{name}' any more: it is lightning_realloc"
    with pytest.raises(ImportError, match=text) as said:
        exec(f"from lightning_realloc import {name}")
    assert callable(pkgutil.resolve_name(str(said.value).rpartition(" ")[2]))
    with pytest.raises(AttributeError, match=text):
        getattr(lightning_realloc, name)
    assert not hasattr(lightning_realloc, name)


def test_the_wheel_holds_only_the_package_and_the_autoload_module(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = tmp_path.glob("lightning_realloc-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))

    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "lightning_realloc",
        "lightning_realloc_autoload.py",
    }
    assert {
        "lightning_realloc/py.typed",
        "lightning_realloc/layout/region.py",
        *(f"lightning_realloc/report/runs/assets/{name}" for name in REPORT_ASSETS),
        "lightning_realloc/report/runs/sections/learning.py",
        "lightning_realloc/setting_hints.yaml",
        "lightning_realloc/environments/turns/response_formats.yaml",
        "lightning_realloc/report/known_models.yaml",
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "realloc = lightning_realloc_autoload:_autoload" in entry_points
    assert "lightning-realloc = lightning_realloc.entry:run_command_line" in entry_points


def test_every_dependency_of_the_tests_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {
        requirement.partition("[")[0].partition(">")[0].strip().lower()
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["test"]]
    }
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {pin.partition("==")[0].strip().lower() for pin in pins}

    assert all("==" in pin and "+" not in pin for pin in pins)
    assert required <= pinned


DISTRIBUTIONS = {"PIL": "pillow", "pynvml": "nvidia-ml-py", "yaml": "pyyaml"}
"""Name of an import -> its package, where it is not the same but for hyphens."""
NEEDED_BY_OTHERS = {"alembic", "mlflow-skinny", "sqlalchemy"}
"""Packages of extras that nothing here names: those of Lightning's logger for MLflow."""
OF_THE_REPOSITORY = {"bench", "docs", "parity", "real", "test"}
"""Extras for tests, benchmarks and examples."""


def test_every_import_is_of_a_dependency_or_an_extra_and_every_extra_is_for_something(
    nodes: Mapping[Path, Sequence[ast.AST]],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: own for name, own in project["optional-dependencies"].items() if name not in OF_THE_REPOSITORY}
    required = {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in project["dependencies"]}
    optional = {re.split(r"[^\w.-]", requirement)[0].lower() for own in extras.values() for requirement in own}

    imported = set().union(*map(_imports, nodes.values())) - sys.stdlib_module_names
    foreign = imported - {"lightning_realloc", "lightning_realloc_autoload"}
    packages = {DISTRIBUTIONS.get(name, name) for name in foreign}
    assert {name.replace("_", "-") for name in packages} <= {name.replace("_", "-") for name in required | optional}

    names = {package: name for name, package in DISTRIBUTIONS.items()}
    words = set(re.findall(r"\w+", " ".join(file.read_text() for file in nodes)))
    unused = {package for package in optional if names.get(package, package.replace("-", "_")) not in words}
    assert unused - NEEDED_BY_OTHERS == set()


def test_the_package_never_prints(nodes: Mapping[Path, Sequence[ast.AST]]) -> None:
    for file, own in nodes.items():
        calls = [node for node in own if isinstance(node, ast.Call)]
        printed = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not printed, f"{file.relative_to(ROOT)} prints in lines {printed}"


UNPICKLING = {
    "rewards/workers/worker.py": "from the process that started it, through a pipe",
    "strategies/checkpoints/checkpoint.py": "a file that the user trusts, by load_weights_only=False",
    "strategies/checkpoints/stored_metadata.py": "torch's file, of torch's plain classes alone",
    "strategies/ray/ray_ranks.py": "Ray itself sends work so",
}
"""Modules that may unpickle, and what."""


def test_nothing_from_a_store_or_another_rank_is_unpickled(nodes: Mapping[Path, Sequence[ast.AST]]) -> None:
    forbidden = {"loads", "load", "Unpickler", "broadcast_object_list", "scatter_object_list"}
    forbidden |= {"all_gather_object", "gather_object", "send_object_list", "recv_object_list"}
    for file, own in nodes.items():
        used = {
            f"{node.value.id}.{node.attr}"
            for node in own
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in forbidden
            if node.value.id in ("pickle", "cloudpickle", "dill", "marshal", "dist", "distributed")
        }
        name = file.relative_to(PACKAGE).as_posix()
        assert not used or name in UNPICKLING, f"{name} uses {used}: send plain data (runtime/messages/objects.py)"
