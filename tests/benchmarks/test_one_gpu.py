"""Parts of the benchmark of one GPU, which run with tiny models on a CPU, and the limits on their time."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.generation import Workload
from benchmarks.harness import BenchmarkReport
from benchmarks.llamas import Shape, build_llama
from benchmarks.one_gpu import LIMIT_S, PARTS, Part, run_parts, unpack_wheels
from benchmarks.one_gpu_decode import call_bytes, step_bytes
from benchmarks.one_gpu_setting import GPU, TINY, Recorder, Result, Scale, Setting
from tests.matrices import matrix

SHAPE = TINY.shapes["8b"]
SMALL = replace(TINY, shapes={"1b": TINY.shapes["1b"]}, batches=(2,), repeats=2, copied_bytes=1 << 20)
CPU = torch.device("cpu")


def measure(part: str, setting: Setting) -> list[Result]:
    results: list[Result] = []
    PARTS[part].measure(setting, Recorder(part, results.append))
    return results


def rows_of(results: list[Result]) -> list[dict[str, Any]]:
    return [result.arguments for result in results if result.method == "add_row"]


@pytest.mark.parametrize("shape", TINY.shapes.values(), ids=TINY.shapes)
def test_the_weights_that_a_step_reads_are_those_of_the_model_without_norms_and_untied_embedding(shape: Shape) -> None:
    model = build_llama(shape, CPU)
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    if not shape.tied:
        del matrices["model.embed_tokens.weight"]
    assert shape.read_weights == sum(weight.numel() for weight in matrices.values())


@pytest.mark.parametrize("length", [1, 7])
def test_operations_are_those_that_torch_counts_less_half_of_the_attention(length: int) -> None:
    model = build_llama(SHAPE, CPU, torch.float32)
    model.set_attn_implementation("eager")  # it multiplies all pairs of positions
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(2, length, dtype=torch.long), use_cache=False)
    skipped = 2 * (length * length - length * (length + 1) / 2)
    pair = 4 * SHAPE.num_blocks * SHAPE.num_heads * SHAPE.head_dim
    computed = SHAPE.forward_flops([length] * 2, num_outputs=2 * length)
    assert counter.get_total_flops() == computed + pair * skipped


def test_bytes_of_a_step_and_of_a_whole_call_are_summed_over_tokens() -> None:
    scale = replace(TINY, attended=5)
    weights = SHAPE.read_weights * 4
    position = 2 * 2 * 2 * 24 * 4  # keys and values, blocks, heads, width, bytes
    assert step_bytes(SHAPE, 3, scale) == weights + 3 * 5 * position
    # A prompt of 2 tokens and 3 new ones: the steps attend to 3, 4 and 5 positions.
    assert call_bytes(SHAPE, Workload(((7, 8),), (3,)), 3, scale) == 3 * weights + (3 + 4 + 5) * position


PART_NAMES = ("decode", "decode_compiled", "prefill", "switch", "generate", "grpo")


@pytest.mark.parametrize("part", matrix(PART_NAMES, "decode", "prefill", "switch"))
def test_a_part_measures_all_of_its_cases(part: str, tmp_path: Path) -> None:
    rows = rows_of(measure(part, Setting(SMALL, "cpu", tmp_path)))
    assert tuple(row["case"] for row in rows) == PARTS[part].cases(SMALL)
    for row in rows:
        assert row["part"] == part
        assert all(value >= 0 for name, value in row.items() if name.endswith(("_s", "seconds", "share", "mfu")))


@pytest.mark.exhaustive  # of a benchmark alone
def test_steps_of_ours_and_trl_are_divided_into_calls_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    setting = Setting(SMALL, "cpu", tmp_path)
    ours, waits, kept = rows_of(measure("grpo", setting))
    assert waits["count"] == 0 and waits["places"] == "none"  # a CPU is never waited for
    assert kept["seconds"] > 0
    results = measure("trl", setting)
    first, theirs = rows_of(results)
    assert (first["step"], theirs["step"]) == (1, 2)
    for row in (ours, first, theirs):
        parts = row["generate_s"] + row["infer_s"] + row["train_s"]
        assert parts == pytest.approx(row["seconds"])
        assert min(row["generate_s"], row["train_s"]) > 0
    assert theirs["over_ours"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    (target,) = [result.arguments for result in results if result.method == "require_at_least"]
    assert target == {"name": "trl: seconds over ours", "value": theirs["over_ours"], "target": 3.0}


def test_trl_that_is_absent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    (row,) = rows_of(measure("trl_batching", Setting(SMALL, "cpu", tmp_path)))
    assert row["not_measured"] == "trl not installed; see --wheels"


@pytest.mark.exhaustive  # of a benchmark alone
def test_every_call_of_ppo_has_its_seconds_and_its_predicted_peak(tmp_path: Path) -> None:
    rows = rows_of(measure("ppo", Setting(SMALL, "cpu", tmp_path)))
    assert tuple(row["case"] for row in rows) == PARTS["ppo"].cases(SMALL)
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["predicted_gb"] > 0 for row in rows)
    # Tensors that other tests left count as measured, so that only too low a prediction can be told.
    assert all(row["error"] < 0.15 for row in rows)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_first_iteration_takes_longer_with_compiled_blocks_in_training_alone(tmp_path: Path) -> None:
    plain, compiled = rows_of(measure("start_up", Setting(SMALL, "cpu", tmp_path)))
    assert compiled["extra_s"] == pytest.approx(compiled["first_s"] - compiled["later_s"])
    assert compiled["extra_s of actor.train"] > plain["extra_s of actor.train"] + 0.2
    assert compiled["extra_s of actor.generate"] < compiled["extra_s of actor.train"]
    assert plain["captures"] == compiled["captures"] == 0  # there are no CUDA graphs on a CPU


def test_wheels_are_imported_without_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    with zipfile.ZipFile(tmp_path / "carried_package-1.5-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "carried_package/__init__.py", "import pathlib\nTEXT = pathlib.Path(__file__).parent / 'a.txt'\n"
        )
        wheel.writestr("carried_package/a.txt", "data beside the code")
        wheel.writestr("carried_package-1.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.5\n")
    unpack_wheels(tmp_path, tmp_path / "site")
    assert importlib.import_module("carried_package").TEXT.read_text() == "data beside the code"
    assert importlib.metadata.version("carried_package") == "1.5"
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}/elsewhere"


def test_the_parts_fit_into_eight_minutes() -> None:
    assert sum(part.budget_s for part in PARTS.values()) <= LIMIT_S == 480
    assert all(len(set(part.cases(GPU))) == len(part.cases(GPU)) for part in PARTS.values())


# --- limits -----------------------------------------------------------------------------------------------------------


def _two_cases(scale: Scale) -> tuple[str, ...]:
    return ("first", "second")


def _complete(setting: Setting, recorder: Recorder) -> None:
    recorder.row("first", figure=1.0)
    recorder.row("second", figure=2.0)
    recorder.at_least("figure", 1.0, 2.0)


def _fails(setting: Setting, recorder: Recorder) -> None:
    recorder.row("first", figure=3.0)
    raise ValueError("the second case fails")


def _hangs(setting: Setting, recorder: Recorder) -> None:
    recorder.row("first", figure=4.0)
    time.sleep(60)


def run(setting: Setting, path: Path | None = None, **measures: Any) -> BenchmarkReport:
    report = BenchmarkReport("demo", group_by="part")
    parts = {name: Part(work, _two_cases, 1.0) for name, work in measures.items()}
    run_parts(parts, setting, report, limit_s=1.0 + len(parts), path=path, start_method="fork")
    return report


def test_a_part_that_fails_or_is_late_keeps_its_figures_and_leaves_the_others_theirs(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = run(Setting(TINY, "cpu", tmp_path), path, hangs=_hangs, fails=_fails, complete=_complete)
    late, failed = "part over its limit of 2 s", "part failed with exit code 1, see the log"
    assert report.rows == [
        {"part": "hangs", "case": "first", "figure": 4.0},
        {"part": "hangs", "case": "second", "not_measured": late},
        {"part": "fails", "case": "first", "figure": 3.0},
        {"part": "fails", "case": "second", "not_measured": failed},
        {"part": "complete", "case": "first", "figure": 1.0},
        {"part": "complete", "case": "second", "figure": 2.0},
    ]
    written = json.loads(path.read_text())
    assert written["rows"] == report.rows
    assert [part["end"] for part in written["settings"]["parts"].values()] == [
        late.removeprefix("part "), failed.removeprefix("part "), "complete",
    ]  # fmt: skip
    assert all(len(part["load_after"]) == 3 for part in written["settings"]["parts"].values())


@pytest.mark.parametrize(("device_type", "num_targets"), [("cpu", 0), ("cuda", 1)])
def test_targets_are_those_of_a_gpu(device_type: str, num_targets: int, tmp_path: Path) -> None:
    report = run(Setting(TINY, device_type, tmp_path), complete=_complete)
    assert [target.name for target in report.targets] == ["complete: figure"] * num_targets


def test_the_report_is_written_after_every_figure(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    seen: list[int] = []

    class Watched(BenchmarkReport):
        def write(self, path: Path | None) -> None:
            super().write(path)
            assert path is not None
            seen.append(len(json.loads(path.read_text())["rows"]))

    report = Watched("demo", group_by="part")
    setting = Setting(TINY, "cpu", tmp_path)
    run_parts({"one": Part(_complete, _two_cases, 1.0)}, setting, report, limit_s=5.0, path=path, start_method="fork")
    assert seen == [1, 2, 2]
