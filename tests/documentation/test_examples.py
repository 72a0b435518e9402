"""Examples of the README and of the documentation run as printed."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning as L
import pytest
import torch
import yaml

from lightning_realloc import GRPO, PPO, ExecutionPlan, PromptDataModule
from lightning_realloc.cli import ReallocCLI
from tests.documentation.pages import PAGES, ROOT, blocks, examples
from tests.documentation.reader import CHATS, PAIRS, write_folder
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

SMALL: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "num_nodes": 1,
    "max_epochs": 1,
    "limit_train_batches": 1,
    "limit_val_batches": 1,
    "limit_predict_batches": 1,
    "num_sanity_val_steps": 0,
    "val_check_interval": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Settings that replace those of every Trainer on the pages."""
OPTIONAL = {"quantization_config=": "bitsandbytes", "MLFlowLogger(": "mlflow", "TrackioLogger(": "trackio"}
"""Text of a block -> package without which it is left out: those that are in no extra of the tests."""


FIRST = ("README.md", "docs/start.md", "docs/training.md", "docs/agents.md", "docs/data.md", "docs/own-algorithm.md")
"""Pages whose examples `make test` runs; `make test-all` runs those of all."""


def has_examples(language: str) -> Any:
    """Parametrize a test by the pages that have code in one language."""
    pages = [page for page in PAGES if examples(page, language)]
    return pytest.mark.parametrize("page", matrix(pages, *(page for page in pages if page in FIRST)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the reader's folder once per module."""
    folder = tmp_path_factory.mktemp("reader")
    write_folder(folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> str:
    """Return a fresh copy of the reader's folder for each page."""
    return str(shutil.copytree(written, tmp_path / "reader"))


def prelude() -> dict[str, Any]:
    """Return the names that pages use without defining them."""
    from train import right_answer

    return {
        "model": GRPO("Qwen/Qwen3-0.6B", right_answer),
        "data": PromptDataModule("train.jsonl", batch_size=4),
        "right_answer": right_answer,
        "rows": CHATS,
        "held_out": CHATS[:8],
        "pairs": PAIRS,
    }


def run_blocks(page: str, module: ModuleType) -> Iterator[None]:
    """Run the Python blocks of a page in one namespace, and yield after each; tracebacks show lines of the page."""
    for block in examples(page, "python"):
        if any(text in block.text and find_spec(package) is None for text, package in OPTIONAL.items()):
            continue
        exec(compile("\n" * block.line + block.text, str(ROOT / page), "exec"), module.__dict__)
        yield


def enter_folder(folder: str, patch: pytest.MonkeyPatch) -> None:
    """Go to the reader's folder, where the script of the first page is ``train.py``."""
    os.chdir(folder)
    patch.setattr("datasets.config.HF_DATASETS_CACHE", Path(folder) / "cache")
    train = ModuleType("train")
    list(run_blocks("docs/start.md", train))
    patch.setitem(sys.modules, "train", train)


def run_page(folder: str, page: str) -> None:
    """Run a page's Python blocks as a script, and train each ``model`` that a block constructs and does not train."""
    initialize = L.Trainer.__init__
    with pytest.MonkeyPatch.context() as patch:
        enter_folder(folder, patch)
        script = ModuleType("__main__")
        script.__dict__.update(prelude())
        patch.setitem(sys.modules, "__main__", script)
        patch.setattr(L.Trainer, "__init__", lambda self, **options: initialize(self, **options | SMALL))
        last = script.model
        for _ in run_blocks(page, script):
            model = script.model
            if model is not last and isinstance(model, L.LightningModule) and model._trainer is None:
                L.Trainer(strategy="realloc").fit(model, script.data)
            last = model


@has_examples("python")
def test_python_of_a_page_runs_from_top_to_bottom(workers: WorkerPool, folder: str, page: str) -> None:
    workers.run(run_page, folder, page, world_size=1, init_process_group=False)


def configuration(part: dict[str, Any]) -> dict[str, Any]:
    """Return a complete configuration of ``fit`` from the part on a page."""
    model = {"class_path": "GRPO", "init_args": {"actor": "Qwen/Qwen3-0.6B", "reward": "train:right_answer"}}
    data = {"class_path": "PromptDataModule", "init_args": {"data": "train.jsonl", "batch_size": 4}}
    whole: dict[str, Any] = {"trainer": {}, "model": model, "data": data}
    for name, value in part.items():
        if name in whole:
            whole[name] = value
        elif name == "callbacks":
            whole["trainer"][name] = value
        else:
            whole["model"]["init_args"][name] = value
    whole["trainer"].update(SMALL)
    return whole


def run_configuration(folder: str, part: dict[str, Any]) -> None:
    """Run ``lightning-realloc fit`` on a configuration."""
    with pytest.MonkeyPatch.context() as patch:
        enter_folder(folder, patch)
        Path("run.yaml").write_text(yaml.safe_dump(configuration(part)))
        ReallocCLI(["fit", "--config", "run.yaml"])


def check_plan(mapping: dict[str, Any]) -> None:
    """Check a plan for the algorithm and the number of ranks that it names."""
    plan = ExecutionPlan.from_mapping(mapping)
    roles = {name.partition(".")[0] for name, _ in plan.calls}
    ranks = {rank for name, _ in plan.calls for rank in plan.layout(name).ranks}
    plan.check((PPO if "critic" in roles else GRPO).dataflow_of(sorted(roles)), len(ranks))


@has_examples("yaml")
def test_yaml_of_a_page_is_a_configuration_that_trains_or_a_plan(workers: WorkerPool, folder: str, page: str) -> None:
    for block in examples(page, "yaml"):
        content = yaml.safe_load(block.text)
        if "calls" in content:
            check_plan(content)
        else:
            workers.run(run_configuration, folder, content, world_size=1, init_process_group=False)


def test_titled_examples_belong_to_another_library_or_need_a_cluster() -> None:
    titled = [(page, block) for page in PAGES for block in blocks(page) if block.info.startswith(("python ", "yaml "))]
    assert Counter(page for page, _ in titled) == {
        "docs/agents.md": 1, "docs/coming-from-trl.md": 3, "docs/environment-libraries.md": 4, "docs/ray.md": 2,
    }  # fmt: skip
    for page, block in titled:
        if page in ("docs/ray.md", "docs/environment-libraries.md"):
            ast.parse(block.text)
        elif page == "docs/agents.md":  # settings of classes of the reader's own
            assert {"environment", "tools"} <= yaml.safe_load(block.text)["model"]["init_args"].keys()


def test_the_first_example_of_the_readme_is_the_script_in_examples() -> None:
    shown = ast.parse(examples("README.md", "python")[0].text).body
    docstring, *script = ast.parse((ROOT / "examples" / "grpo.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert [ast.unparse(node) for node in shown] == [ast.unparse(node) for node in script]


def fit_with_layouts_of_the_readme(folder: str) -> tuple[list[str], str, int]:
    """Run the README's second example, then train with its plan; return layouts, device type and number of steps."""
    os.chdir(folder)
    names: dict[str, Any] = {"L": L}
    exec(examples("README.md", "python")[1].text, names)
    trainer = names["trainer"]
    trainer.fit_loop.max_epochs = 1
    trainer.fit(runs.grpo(kl_coef=0.0), Batches(1))
    layouts = [str(trainer.strategy.plan.layout(call)) for call in names["plan"]["calls"]]
    return layouts, trainer.strategy.root_device.type, trainer.global_step


@pytest.mark.skipif(torch.cuda.is_available(), reason="the example takes the accelerator there is, and four of it")
def test_the_layouts_of_the_readme_train_without_naming_an_accelerator(workers: WorkerPool, tmp_path: Path) -> None:
    everyone = workers.run(fit_with_layouts_of_the_readme, str(tmp_path), init_process_group=False, deadline_s=120.0)
    assert everyone == [(["dp2.tp2@0-3", "fsdp4@0-3"], "cpu", 1)] * 4
