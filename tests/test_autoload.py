"""Autoload hook: effects of importing torch and Lightning, each in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.matrices import matrix

# A stand-in for our package, so that tests do not construct the real strategy.
STAND_IN = """
import lightning.pytorch as pl

class ReallocStrategy(pl.strategies.SingleDeviceStrategy):
    def __init__(self, **options):
        super().__init__(device="cpu")
        self.options = options
"""
QUIET = "quiet = dict(logger=False, enable_checkpointing=False, accelerator='cpu', devices=1)\n"
TRAINERS = QUIET + (
    "print([name for name in sys.modules if 'realloc' in name])\n"
    "for name in ('realloc', 'realloc_spawn', 'realloc_fork', 'realloc_ray', 'realloc-static'):\n"
    "    print('made', name, L.Trainer(strategy=name, **quiet).strategy.options)\n"
)
BROKEN = QUIET + (
    "L.Trainer(strategy='ddp', **quiet)\n"
    "try:\n"
    "    L.Trainer(strategy='realloc', **quiet)\n"
    "except RuntimeError as error:\n"
    "    print(error)\n"
)
OTHER_LIGHTNING = (
    "import pytorch_lightning as pl\n"
    "from lightning_realloc import ReallocError\n"
    "try:\n"
    "    pl.Trainer(strategy='realloc', logger=False, enable_checkpointing=False)\n"
    "except ReallocError as error:\n"
    "    print(error)\n"
)
# A stand-in for Lightning, whose import takes seconds. It is enough for the hook, which reads only the registry.
REGISTRY = """
class StrategyRegistry(dict):
    def register(self, name, strategy, **options):
        self[name] = strategy

StrategyRegistry = StrategyRegistry()
"""
LIGHTNINGS = matrix(["stand-in", "real"], "stand-in")
# Importing torch and Lightning takes seconds: each script runs in a fork of one interpreter that imported only them.
# The hook is installed by torch's import, and fails after that: neither is seen there.
FORKS = (
    "import lightning_realloc_autoload as autoload\n"
    "install = autoload.install\n"
    "def install_and_fail():\n"
    "    install()\n"
    "    print('failed', flush=True)\n"
    "    raise OSError\n"
    "autoload.install = install_and_fail\n"
    "import torch\n"
    "autoload.install = install\n"
    "import json, os, sys, lightning as L\n"
    "for script, paths in json.load(sys.stdin):\n"
    "    if os.fork() == 0:\n"
    "        sys.path[:0] = paths\n"
    "        exec(script)\n"
    "        sys.exit()\n"
    "    os.wait()\n"
    "    print('---', flush=True)\n"
)


def _python(script: str, *path: Path, asked: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds modules in ``path`` before the installed ones."""
    # -P leaves out the working directory: the package must be found as an installed one.
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        input=asked,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def _package(folder: Path, contents: str) -> list[str]:
    """Write a stand-in for our package, and return its folder."""
    package = folder / "lightning_realloc"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(contents)
    (package / "strategies.py").write_text(STAND_IN)
    return [str(folder)]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Output of each script that imports torch and Lightning."""
    folder = tmp_path_factory.mktemp("packages")
    stand_in, broken = _package(folder / "a", ""), _package(folder / "b", "raise RuntimeError('broken on purpose')")
    scripts = {TRAINERS: stand_in, BROKEN: broken}

    finished = _python(FORKS, asked=json.dumps(list(scripts.items())))

    first, *lines = finished.stdout.splitlines(keepends=True)
    *outputs, rest = "".join(lines).split("---\n")
    assert len(outputs) == len(scripts) and not rest, finished.stderr
    return {"import torch": first, **dict(zip(scripts, outputs, strict=True))}


def test_a_trainer_knows_our_strategies_without_an_import_of_the_package(said: dict[str, str]) -> None:
    assert [line for line in said[TRAINERS].splitlines() if line.startswith("made")] == [
        "made realloc {}",
        "made realloc_spawn {'launcher': 'spawn'}",
        "made realloc_fork {'launcher': 'fork'}",
        "made realloc_ray {'launcher': 'ray'}",
        "made realloc-static {'plan': 'static'}",
    ]


def test_the_package_is_imported_only_when_a_trainer_uses_the_strategy(said: dict[str, str]) -> None:
    assert said[TRAINERS].startswith("['lightning_realloc_autoload']\nmade realloc ")


@pytest.mark.exhaustive
def test_the_hook_alone_imports_the_installed_package() -> None:
    script = (
        "import lightning as L\n"
        "trainer = L.Trainer(strategy='realloc', logger=False, accelerator='cpu', devices=1)\n"
        "print(type(trainer.strategy).__module__)\n"
    )
    finished = _python(script)
    assert finished.stdout.splitlines()[-1:] == ["lightning_realloc.strategies.realloc"], finished.stderr


def test_a_broken_package_breaks_neither_torch_nor_other_strategies(said: dict[str, str]) -> None:
    assert said[BROKEN].splitlines()[-1:] == ["broken on purpose"]


def _registry(folder: Path, package: str, strategies: str = REGISTRY) -> Path:
    """Write a stand-in for a package of Lightning, and return its folder."""
    path = folder.joinpath(*package.split("."))
    path.mkdir(parents=True)
    if path.parent != folder:
        (path.parent / "__init__.py").write_text("")
    (path / "__init__.py").write_text("from . import strategies")
    (path / "strategies.py").write_text(strategies)
    return folder


def _lightning(folder: Path, kind: str) -> list[Path]:
    return [_registry(folder, "lightning.pytorch")] if kind == "stand-in" else []


@pytest.mark.parametrize("lightning", LIGHTNINGS)
def test_without_autoload_only_importing_the_package_registers_the_strategies(tmp_path: Path, lightning: str) -> None:
    script = (
        "from importlib.metadata import entry_points\n"
        "for hook in entry_points(group='torch.backends'):\n"
        "    hook.load()()\n"  # as `import torch` does
        "import lightning.pytorch as pl\n"
        "print('realloc' in pl.strategies.StrategyRegistry)\n"
        "import lightning_realloc\n"
        "print('realloc' in pl.strategies.StrategyRegistry)\n"
    )

    finished = _python(script, *_lightning(tmp_path, lightning), LIGHTNING_REALLOC_AUTOLOAD="0")

    assert finished.stdout.split() == ["False", "True"], finished.stderr


@pytest.mark.parametrize("lightning", LIGHTNINGS)
def test_importing_the_package_first_registers_without_importing_lightning(tmp_path: Path, lightning: str) -> None:
    script = (
        "import sys, lightning_realloc\n"
        "print('torch' in sys.modules, 'lightning' in sys.modules)\n"
        "import lightning.pytorch as pl\n"
        "print([name for name in pl.strategies.StrategyRegistry if 'realloc' in name])\n"
    )

    finished = _python(script, *_lightning(tmp_path, lightning), LIGHTNING_REALLOC_AUTOLOAD="0")

    imported, registered = finished.stdout.splitlines()
    assert imported == "False False"
    assert registered == "['realloc', 'realloc_spawn', 'realloc_fork', 'realloc_ray', 'realloc-static']"


def test_torch_imports_even_if_the_hook_fails(said: dict[str, str]) -> None:
    assert said["import torch"] == "failed\n"


def test_lightning_imports_even_if_its_registry_has_changed(tmp_path: Path) -> None:
    _registry(tmp_path, "lightning.pytorch", "StrategyRegistry = ()")

    finished = _python("import lightning_realloc, lightning.pytorch.strategies as s; print(s.__file__)", tmp_path)

    assert finished.stdout.strip() == str(tmp_path / "lightning" / "pytorch" / "strategies.py")
    assert "strategy='realloc' could not be registered with lightning.pytorch.strategies" in finished.stderr


def test_the_strategies_of_pytorch_lightning_name_the_import_to_use(tmp_path: Path) -> None:
    script = (
        "import lightning_realloc, pytorch_lightning.strategies as s\n"
        "try:\n"
        "    s.StrategyRegistry['realloc']()\n"
        "except lightning_realloc.ReallocError as error:\n"
        "    print(error)\n"
    )

    finished = _python(script, _registry(tmp_path, "pytorch_lightning"))

    assert "write `import lightning as L`" in finished.stdout, finished.stderr


@pytest.mark.exhaustive
def test_a_trainer_of_pytorch_lightning_is_refused_with_the_import_to_use() -> None:
    if find_spec("pytorch_lightning") is None:
        pytest.skip("needs pytorch_lightning")
    finished = _python(OTHER_LIGHTNING)

    assert "write `import lightning as L`" in finished.stdout, finished.stderr
