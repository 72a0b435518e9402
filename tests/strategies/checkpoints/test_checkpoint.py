from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lightning_realloc.algorithms.sft import SFT
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.errors import CheckpointError
from lightning_realloc.strategies.checkpoints.checkpoint import (
    UNKNOWN,
    changed_models,
    random_state,
    read_meta,
    refuse_folder,
    set_random_state,
)
from lightning_realloc.strategies.checkpoints.checkpoint_files import META_FILE
from lightning_realloc.strategies.checkpoints.safety.verification import verify_checkpoint
from tests.matrices import matrix
from tests.models import UNEVEN_HEADS
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import (
    Linear,
    Part,
    contents,
    differences,
    fit_in_forked_processes,
    fit_with_model_checkpoint,
    refusals,
    replicated_weights,
    resume_with_hyperparameters,
    run_parts,
    run_plain_module,
    save_after,
    save_onto,
    save_weights_only,
)
from tests.workers import WorkerPool

GRPO_PLAN = runs.calls(actor_generate="tp2", reference_infer="dp2", actor_train="fsdp2")

PPO_PLAN = runs.calls(
    actor_generate="dp2", reference_infer="dp2", critic_infer="dp2", actor_train="fsdp2", critic_train="fsdp2"
)


def _sft(layout: str) -> dict[str, Any]:
    return runs.calls(actor_train=layout)


# ---- resuming gives the same run
@pytest.mark.exhaustive  # PPO, from a save in the background: test_background.py; SFT, with dropout: below
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "sft"])
def test_a_resumed_run_equals_the_straight_run_bit_by_bit(workers: WorkerPool, tmp_path: Path, algorithm: str) -> None:
    plan = {"grpo": GRPO_PLAN, "ppo": PPO_PLAN, "sft": _sft("fsdp2")}[algorithm]
    straight = Part(plan, 4, save=tmp_path / "straight", save_at=(2,), algorithm=algorithm)
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)

    logged = workers.run(run_parts, [straight, resumed], 2, world_size=2, init_process_group=False)[0]

    assert logged[1] == logged[0][2:]  # two steps, the last one in the next epoch
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}


@pytest.mark.exhaustive  # a run that saved and one that resumed are equal: above
def test_saving_changes_no_result(workers: WorkerPool, tmp_path: Path) -> None:
    # PyTorch steps an optimizer without state in order to save it, which changes weights under Adam.
    saving = Part(_sft("fsdp2"), 3, save=tmp_path / "saving", save_at=(0, 1))
    silent = replace(saving, save=tmp_path / "silent", save_at=())
    fresh = replace(silent, resume=tmp_path / "saving-0", save=tmp_path / "fresh")

    logged = workers.run(run_parts, [saving, silent, fresh], 2, world_size=2, init_process_group=False)[0]

    assert logged[0] == logged[1] == logged[2]
    assert differences(contents(tmp_path / "saving"), contents(tmp_path / "silent")) == {}
    assert differences(contents(tmp_path / "fresh"), contents(tmp_path / "silent")) == {}
    assert not [name for name in contents(tmp_path / "saving-0") if name.startswith("optimizer")]


@pytest.mark.parametrize("optimizer", matrix(["sgd", "momentum"], "momentum"))
def test_an_optimizer_without_state_resumes_too(workers: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    straight = Part(_sft("fsdp2"), 3, save=tmp_path / "straight", save_at=(1,), optimizer=optimizer)
    resumed = replace(straight, resume=tmp_path / "straight-1", save=tmp_path / "resumed", save_at=())

    workers.run(run_parts, [straight, resumed], 2, world_size=2, init_process_group=False)

    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}


def test_dropout_continues_after_resuming(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part(_sft("fsdp2"), 2, save=tmp_path / "straight", save_at=(1,), family="gpt2", dropout=0.3)
    resumed = replace(straight, resume=tmp_path / "straight-1", save=tmp_path / "resumed", save_at=(), seed=99)
    without = replace(straight, max_steps=1, save=None, save_at=(), dropout=0.0)

    logged = workers.run(run_parts, [straight, resumed, without], 2, world_size=2, init_process_group=False)[0]

    assert logged[1] == logged[0][1:]
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}
    assert logged[2] != logged[0][:1], "the test drops nothing"


def test_dropout_is_the_same_on_tensor_parallel_ranks(workers: WorkerPool) -> None:
    part = Part(_sft("tp2"), 2, family="phi3", dropout=0.3)

    first, second = workers.run(replicated_weights, part, 2, world_size=2, init_process_group=False)

    assert first and differences(first, second) == {}


def test_random_numbers_of_users_continue_after_resuming(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    draw()
    torch.save(random_state(torch.device("cpu")), tmp_path / "state.pt")
    expected = draw()
    draw()

    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu"))

    assert draw() == expected


# ---- into other layouts and other numbers of ranks
@pytest.mark.parametrize("kind", matrix(["even", "9/3", "experts"], "9/3"))
def test_a_run_through_several_layouts_equals_a_run_in_one(workers: WorkerPool, tmp_path: Path, kind: str) -> None:
    # With 9 and 3 heads, ranks hold different numbers of them. Two pipeline stages hold the tied embeddings.
    sizes = {"tie_word_embeddings": True, **UNEVEN_HEADS.get(kind, {})}
    family = "mixtral" if kind == "experts" else "llama"
    straight = Part("static", 3, save=tmp_path / "straight", sizes=sizes, family=family)
    layouts = ("pp2.fsdp2@1,3,0,2", "tp4@1,2,3,0", "fsdp2.tp2@3,2,1,0")
    if kind == "experts":
        layouts = ("pp2.fsdp2.ep2@1,3,0,2", "dp2.fsdp2.ep4", "fsdp4.ep2@3,2,1,0")
    parts = [
        replace(
            straight, plan=_sft(layout), max_steps=step + 1, resume=tmp_path / str(step) if step else None,
            save=tmp_path / str(step + 1),
        )
        for step, layout in enumerate(layouts)
    ]  # fmt: skip

    (alone,) = workers.run(run_parts, [straight], 1, world_size=1, init_process_group=False)[0]
    logged = workers.run(run_parts, parts, 4, init_process_group=False, deadline_s=120)[0]

    _close(alone, [entry for part in logged for entry in part])
    _close_contents(tmp_path / "3", tmp_path / "straight")


@pytest.mark.exhaustive
def test_a_run_in_interleaved_stages_resumes_there_and_in_other_layouts(workers: WorkerPool, tmp_path: Path) -> None:
    def plan(layout: str) -> dict[str, Any]:
        return runs.calls(actor_generate="dp2.tp2", reference_infer="dp4", actor_train=layout)

    straight = Part(
        plan("pp2.vpp2.fsdp2"), 4, save=tmp_path / "straight", save_at=(2,), algorithm="grpo",
        sizes={"num_hidden_layers": 4, "tie_word_embeddings": True},
    )  # fmt: skip
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)
    cut = replace(resumed, plan=plan("fsdp2.tp2"), save=tmp_path / "cut", max_steps=3)
    divided = replace(resumed, plan=plan("cp2.tp2@3,1,2,0"), resume=tmp_path / "cut", save=tmp_path / "divided")

    parts = [straight, resumed, cut, divided]
    logged = workers.run(run_parts, parts, 4, init_process_group=False, deadline_s=200)[0]

    assert logged[1] == logged[0][2:]
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}
    _close(logged[0][2:], logged[2] + logged[3])
    _close_contents(tmp_path / "divided", tmp_path / "straight")


@pytest.mark.exhaustive  # other layouts: see above; fewer ranks: the two tests of frozen roles and of roles apart
def test_a_run_on_changing_numbers_of_ranks_equals_a_run_on_one(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part("static", 3, save=tmp_path / "straight")
    logged = workers.run(run_parts, [straight], 1, world_size=1, init_process_group=False)[0]
    after: list[dict[str, float]] = []
    for step, (layout, world_size) in enumerate([("dp2.tp2", 4), ("dp1", 1), ("fsdp2", 2)]):
        before = tmp_path / str(step) if step else None
        part = Part(_sft(layout), step + 1, resume=before, save=tmp_path / str(step + 1))
        after += workers.run(run_parts, [part], world_size, world_size=world_size, init_process_group=False)[0][0]

    _close(logged[0], after)
    _close_contents(tmp_path / "3", tmp_path / "straight")


def _close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(one, abs=1e-6, rel=1e-6)


def _close_contents(ours: Path, theirs: Path) -> None:
    apart = {name: size for name, size in differences(contents(ours), contents(theirs)).items() if size > 1e-6}
    assert apart == {}


# ---- contents of the folder
def test_frozen_roles_and_earlier_ranks_leave_no_files(workers: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "run.ckpt"
    workers.run(
        run_parts, [Part(GRPO_PLAN, 1, save=folder, algorithm="grpo")], 2, world_size=2, init_process_group=False
    )
    (tmp_path / "run.ckpt.partial").mkdir()  # as left by a run that was killed during a write
    two = {path.name for path in folder.glob("*.distcp")}
    one = Part("static", 2, resume=folder, save=folder, algorithm="grpo")

    workers.run(run_parts, [one], 1, world_size=1, init_process_group=False)

    assert len(two) == 2
    assert [path.name for path in folder.glob("*.distcp")] == ["__0_0.distcp"]
    assert [path.name for path in tmp_path.iterdir()] == ["run.ckpt"]
    description = json.loads((folder / "realloc.json").read_text())
    assert {role: entry["saved"] for role, entry in description["roles"].items()} == {"actor": True, "reference": False}
    assert not [name for name in contents(folder) if "reference" in name]
    assert torch.load(folder / "meta.pt", weights_only=True)["global_step"] == 2  # plain data only


def test_differences_between_frozen_models_are_named_by_hand() -> None:
    before = {"reference": "base", "teacher": None, "partner_a": UNKNOWN, "partner_b": "big"}
    assert changed_models(before, before) == []
    assert changed_models(before, {"reference": "other", "teacher": "base", "partner_a": "x", "partner_c": None}) == [
        "with partner_b=big, which this run lacks",
        "with reference=base, which is other in this run",
        "with teacher=a module, which is base in this run",
        "without partner_c, which is a module in this run",
    ]


@pytest.mark.parametrize("save_last", matrix([True, "link"], True))
def test_model_checkpoint_treats_folders_as_files(workers: WorkerPool, tmp_path: Path, save_last: Any) -> None:
    first, second, steps = workers.run(
        fit_with_model_checkpoint, tmp_path, 2, save_last, world_size=2, init_process_group=False
    )[0]

    assert steps == [3, 4]
    assert len(first) == 3  # the two best, and the last
    assert "last.ckpt@" in first
    # A run that saved nothing else writes "last" whole at its end.
    assert len(second) == 3 and {"last.ckpt", "last.ckpt@"} & set(second)
    assert verify_checkpoint(tmp_path / "last.ckpt")


def test_a_folder_that_is_no_checkpoint_is_never_replaced(workers: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("ten years")
    (tmp_path / "file").write_text("")
    paths = [tmp_path / "home", tmp_path / "file" / "below", tmp_path / "new", tmp_path / "new", tmp_path / "file"]

    answers = workers.run(save_onto, paths, 2, world_size=2, init_process_group=False)

    assert answers[0] == answers[1]
    home, below, *others = answers[0]
    assert home == (
        f"{tmp_path / 'home'} is a folder but not a checkpoint, and writing one would replace it; choose another path"
    )
    assert below is not None and str(tmp_path / "file") in below
    assert others == [None, None, None]
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


def test_hyperparameters_are_read_unless_weights_only_is_requested(workers: WorkerPool, tmp_path: Path) -> None:
    # Lightning drops fit(weights_only=...) for strategies that restore after setup, and fails on any dataclass.
    answers = workers.run(resume_with_hyperparameters, tmp_path / "run.ckpt", 2, world_size=2, init_process_group=False)

    for steps, refusal in answers:
        assert steps == 2
        assert "load_weights_only=False" in refusal


def test_a_public_class_in_a_checkpoint_is_found_after_its_module_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = {"hyper_parameters": TrainOptions(num_epochs=2)}
    with monkeypatch.context() as before:
        module = ModuleType("lightning_realloc.runtime.training")
        before.setattr(module, "TrainOptions", TrainOptions, raising=False)
        before.setitem(sys.modules, module.__name__, module)
        before.setattr(TrainOptions, "__module__", module.__name__)
        torch.save(written, tmp_path / META_FILE)
    assert b"runtime.training" in (tmp_path / META_FILE).read_bytes()

    assert read_meta(tmp_path, weights_only=False) == written


# ---- errors
def test_a_checkpoint_of_something_else_is_refused_on_every_rank(workers: WorkerPool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    (tmp_path / "file.ckpt").write_text("")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    parts = [
        Part("static", 1, save=saved),
        Part("static", 2, resume=saved, family="qwen3"),
        Part("static", 2, resume=saved, family="gemma"),
        Part("static", 2, resume=saved, algorithm="grpo"),
        Part("static", 2, resume=saved, optimizer="sgd"),
        Part("static", 2, resume=tmp_path / "file.ckpt"),
        Part("static", 2, resume=tmp_path / "model"),
        Part("static", 2, resume=tmp_path / "nothing"),
    ]

    answers = workers.run(refusals, parts, 2, world_size=2, init_process_group=False)

    assert answers[0] == answers[1]
    ran, qwen3, gemma, algorithm, optimizer, file, model, nothing = answers[0]
    assert ran is None
    assert "actor parameter model.layers.0.self_attn.q_norm.weight is not in the checkpoint" in qwen3
    assert "actor parameter lm_head.weight is only in the checkpoint" in gemma
    assert "was saved by SFT and cannot be resumed by RecordedGRPO" in algorithm
    assert "actor was trained by AdamW with 1 parameter groups" in optimizer and "is by SGD" in optimizer
    assert "it is a file" in file
    assert "it is a Hugging Face model: give it as a model's path" in model
    assert "it is missing" in nothing


def test_weights_alone_suffice_to_validate_but_not_to_resume(workers: WorkerPool, tmp_path: Path) -> None:
    answers = workers.run(save_weights_only, tmp_path / "run.ckpt", 2, world_size=2, init_process_group=False)

    for refusal in answers:
        assert "holds no optimizer state for 'actor' (saved with save_weights_only?)" in refusal


def test_a_checkpoint_after_an_evaluation_equals_one_after_the_fit(workers: WorkerPool, tmp_path: Path) -> None:
    said = workers.run(save_after, "validate", tmp_path, 2, world_size=2, init_process_group=False)

    assert said == ["", ""]
    fitted = contents(tmp_path / "fitted")
    assert any("exp_avg" in name for name in fitted)
    assert differences(contents(tmp_path / "evaluated"), fitted) == {}


def test_weights_that_an_evaluation_read_are_saved_alone_with_a_warning(workers: WorkerPool, tmp_path: Path) -> None:
    save = partial(save_after, ckpt_path=tmp_path / "fitted")
    said = workers.run(save, "validate", tmp_path, 2, world_size=2, init_process_group=False)

    assert "no run can be resumed from" in said[0] and "it holds only weights" in said[0]
    assert not any("exp_avg" in name for name in contents(tmp_path / "evaluated"))


def test_load_from_checkpoint_names_the_alternative() -> None:
    with pytest.raises(CheckpointError, match=r"ckpt_path=.*lightning-realloc export run\.ckpt"):
        SFT.load_from_checkpoint("run.ckpt")


# ---- other ways to run
def test_a_plain_module_is_saved_to_a_single_file(workers: WorkerPool, tmp_path: Path) -> None:
    straight, resumed = workers.run(run_plain_module, tmp_path, 2, world_size=2, init_process_group=False)[0]

    assert differences(resumed, straight) == {}
    stored = torch.load(tmp_path / "straight.ckpt", weights_only=True)
    assert differences(stored["state_dict"], straight) == {}
    assert stored["optimizer_states"][0]["state"][0]["momentum_buffer"].shape == (4, 3)
    assert differences(Linear.load_from_checkpoint(tmp_path / "straight.ckpt").state_dict(), straight) == {}


def test_a_plain_module_is_not_read_from_a_folder(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="a folder, but this LightningModule declares no calls and is read from a single file"
    ):
        refuse_folder(tmp_path)


def test_weights_come_back_from_forked_processes(tmp_path: Path) -> None:
    pool = WorkerPool()  # in a process without earlier training, since its threads do not survive a fork
    try:
        weights, loss = pool.run(fit_in_forked_processes, tmp_path, world_size=1, init_process_group=False)[0]
    finally:
        pool.close()

    saved = {name: weight for name, weight in contents(tmp_path / "saved-2").items() if name.startswith("model/")}
    assert differences({f"model/actor/{name}": weight for name, weight in weights.items()}, saved) == {}
    assert loss > 0
