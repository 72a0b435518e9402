"""Effects of importing torch and Lightning (the autoload hook), and parts that nothing imports before they are needed.

Each is seen in a fresh interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from lightning_realloc.cli import ReallocCLI
from lightning_realloc.commands.short_run import COMMANDS
from lightning_realloc.entry import OTHER_COMMANDS, SUMMARIES, help_text
from tests.matrices import matrix

ROOT = Path(__file__).parents[1]

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
# ---- scripts that run with the package itself
HELP = """
sys.argv = ["lightning-realloc", "--help"]
from lightning_realloc import entry
code = entry.run_command_line()
sys.argv = ["lightning-realloc", "--version"]
entry.run_command_line()
print(json.dumps([code, sorted({"torch", "lightning", "transformers", "jsonargparse"} & set(sys.modules))]))
"""
FIT = """
found = {}

def loaded(part):
    return [name for name in sys.modules if part in name]

from lightning_realloc import DPO, GRPO, SamplingParams, setting_hints
from tests.models import byte_tokenizer, tiny_model
from tests.strategies.runs import Batches, low_tokens
sampling = SamplingParams(n=2, max_new_tokens=4)
module = GRPO(tiny_model("llama"), low_tokens, kl_coef=0.0, tokenizer=byte_tokenizer(), sampling=sampling)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(accelerator="cpu", devices=1, strategy="realloc", max_steps=1, **quiet).fit(module, Batches(1))
found["fit"] = sorted(name for name in sys.modules if name.startswith("lightning_realloc."))

tables = setting_hints._read_tables.cache_info
DPO("x", beta=0.3)
found["hints"] = tables().currsize
try:
    SamplingParams(max_tokens=2)
except ValueError:
    found["hints after an unknown setting"] = tables().currsize

import lightning_realloc.cli
found["command line"] = loaded("lightning_realloc.report")

import lightning_realloc.rewards.ray_reward
found["ray"] = "ray" in sys.modules
print(json.dumps(found))
"""
END = "--- the end of a script\n"
# Importing torch and Lightning takes seconds: each script runs in a fork of one interpreter that imported only them, or
# has not yet. The hook is installed by torch's import, and fails after that: neither is seen there.
FORKS = f"""
import json, os, sys

def run(script, paths):
    if os.fork() == 0:
        sys.path[:0] = paths
        exec(script, globals())
        sys.exit()
    os.wait()
    print({END!r}, end="", flush=True)

first, *others = json.load(sys.stdin)
run(*first)

import lightning_realloc_autoload as autoload
install = autoload.install
def install_and_fail():
    install()
    print("failed", flush=True)
    raise OSError
autoload.install = install_and_fail
import torch
autoload.install = install
import lightning as L
print({END!r}, end="", flush=True)
for other in others:
    run(*other)
"""


def _python(script: str, *path: Path, asked: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter that finds modules in ``path`` before the installed ones."""
    # -P leaves out the working directory: the package must be found as an installed one.
    return subprocess.run(
        [sys.executable, "-P", "-c", script],
        input=asked,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        capture_output=True,
        text=True,
        timeout=300,
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
    """Output of each script that imports torch and Lightning, or neither."""
    folder = tmp_path_factory.mktemp("packages")
    stand_in, broken = _package(folder / "a", ""), _package(folder / "b", "raise RuntimeError('broken on purpose')")
    scripts = {HELP: [str(ROOT)], TRAINERS: stand_in, BROKEN: broken, FIT: [str(ROOT)]}

    finished = _python(FORKS, asked=json.dumps(list(scripts.items())))

    help_and_version, imports, *outputs, rest = finished.stdout.split(END)
    assert len(outputs) == len(scripts) - 1 and not rest, finished.stderr
    return {"import torch": imports, **dict(zip(scripts, [help_and_version, *outputs], strict=True))}


@pytest.fixture(scope="module")
def found(said: dict[str, str]) -> Mapping[str, Any]:
    """What `FIT` had loaded after each step."""
    return json.loads(said[FIT].splitlines()[-1])  # type: ignore[no-any-return]


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


# ---- parts that nothing imports before they are needed
@pytest.mark.parametrize("part", [
    "report", "recording", "cli", "strategies.ray", "strategies.checkpoints.remote",
    "environments.adapters", "environments.python_tool", "rewards.sandbox", "rewards.workers",
    "generation.speculative", "generation.rebalance", "generation.vllm",
])  # fmt: skip
def test_a_small_fit_imports_no_part_that_a_setting_asks_for(found: Mapping[str, Any], part: str) -> None:
    assert "lightning_realloc.generation.engine" in found["fit"]
    assert [name for name in found["fit"] if f"{name}.".startswith(f"lightning_realloc.{part}.")] == []


def test_hints_are_loaded_only_after_an_unknown_setting(found: Mapping[str, Any]) -> None:
    assert found["hints"] == 0
    assert found["hints after an unknown setting"] == 1


def test_the_command_line_imports_no_report_before_a_command_asks_for_one(found: Mapping[str, Any]) -> None:
    assert found["command line"] == []


def test_nothing_imports_ray_before_it_is_asked_for(found: Mapping[str, Any]) -> None:
    assert found["ray"] is False


def test_help_and_version_import_no_torch(said: dict[str, str]) -> None:
    *_, version, found = said[HELP].splitlines()
    assert json.loads(found) == [0, []]
    assert version.startswith("lightning-realloc ")


def test_reports_import_no_torch_and_end_a_mistake_with_one_line(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.argv = ['lightning-realloc', 'report', {str(tmp_path)!r}]\n"
        "from lightning_realloc.entry import run_command_line\n"
        "import lightning_realloc.commands.dashboard_command\n"
        "print(run_command_line(), sorted({'torch', 'lightning', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 []\n" and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_help_names_every_command() -> None:
    named = [name for commands in SUMMARIES.values() for name in commands]
    assert sorted(named) == sorted([*COMMANDS, *OTHER_COMMANDS, *ReallocCLI.subcommands()])
    assert all(f"  {name} " in help_text() for name in named)
    assert all(len(line) <= 100 for line in help_text().splitlines())


def test_the_functions_of_other_commands_exist() -> None:
    for path in OTHER_COMMANDS.values():
        assert callable(resolve_name(f"lightning_realloc.{path}"))
