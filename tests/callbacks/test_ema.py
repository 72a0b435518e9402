"""EMA equals the average of whole weights in every layout, and is saved, resumed and exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

from lightning_realloc.callbacks import EMA, SaveHuggingFace
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.export import export_checkpoint
from lightning_realloc.strategies.pool.weight_averages import AVERAGE, update_averages
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.checkpoints.checkpoint_runs import BATCH_SIZE, Part, SaveAt, contents, table
from tests.strategies.pool.test_set_plan import Move
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

DECAY = 0.75
# With the default eps the last bit of a tiny gradient decides the step.
OPTIMIZERS = {"adam": partial(AdamW, lr=1e-2, eps=1e-4), "sgd": partial(SGD, lr=0.5)}


def whole(strategy: Any) -> dict[str, Tensor]:
    """Return a copy of the actor's whole weights, on rank 0."""
    return {name: weight.detach().clone() for name, weight in strategy.full_weights("actor").items()}


class Weights(Callback):
    """Records the actor's whole weights after every iteration, and those used in evaluation."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Tensor]] = []
        self.validated: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Gather the weights."""
        self.trained.append(whole(trainer.strategy))

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        """Gather the weights used in evaluation."""
        self.validated.append(whole(trainer.strategy))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


Run = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], dict[str, Tensor]]
"""Weights after every iteration and at the end, those validated, and the final averages."""


def average(plans: list[Any], optimizer: str, folder: Path) -> list[Run]:
    """Train and validate under each plan, a tuple of every iteration's layouts."""
    found, world_size = [], runs.world_size()
    for number, layouts in enumerate(plans):
        first, *later = [calls(actor_train=layout) for layout in layouts] or ["heuristic"]
        strategy, weights = ReallocStrategy(first, overlap="calls"), Weights()
        ema = EMA(DECAY, start_step=2)
        callbacks = [weights, ema, SaveHuggingFace(folder / f"model-{number}", averaged=True, model_card=False)]
        trainer = runs.trainer(
            strategy, world_size, callbacks=[*callbacks, Move(dict(enumerate(later, start=1)))], limit_val_batches=1
        )
        batches = Batches(4, responses=True)
        trainer.fit(runs.sft(optimizer=OPTIMIZERS[optimizer]), batches, val_dataloaders=batches)
        with strategy.averages.in_place_of_weights("actor"):
            averages = whole(strategy)
        weights.trained.append(whole(strategy))
        trainer.save_checkpoint(folder / f"run-{number}")
        found.append((weights.trained, weights.validated, averages))
    return found


@pytest.mark.parametrize("optimizer", matrix(OPTIMIZERS, "adam"))
def test_averages_equal_those_of_whole_weights(workers: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    plans = [("fsdp2",), ("fsdp2", "tp2", "pp2", "dp2")]
    ranks = workers.run(average, plans, optimizer, tmp_path, world_size=2, init_process_group=False, deadline_s=120.0)
    for number, ((*trained, last), validated, averages) in enumerate(ranks[0]):
        expected = trained[1]
        for now in trained[2:]:
            expected = {name: torch.lerp(expected[name], now[name], 1 - DECAY) for name in now}
        assert runs.largest_difference(averages, expected) <= 1e-7
        assert runs.largest_difference(averages, last) > 1e-3, "the test averages what does not change"
        assert runs.largest_difference(validated[0], expected) <= 1e-7
        assert runs.largest_difference(last, trained[-1]) == 0.0, "the weights came back"
        # From the checkpoint, and from the running model.
        exported = export_checkpoint(tmp_path / f"run-{number}", tmp_path / f"exported-{number}", averaged=True)
        for folder in (exported, tmp_path / f"model-{number}"):
            read = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
            assert runs.largest_difference(dict(read.named_parameters()), averages) == 0.0
    assert runs.largest_difference(ranks[0][1][2], ranks[0][0][2]) <= 1e-5


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
HELD: dict[str, tuple[Any, dict[str, Any]]] = {
    "offloaded": (calls(actor_train="fsdp2") | {"offload": ["actor.optimizer"]}, {}),
    "adapters, offloaded": (calls(actor_train="fsdp2") | {"offload": ["actor.optimizer"]}, {"peft_config": LORA}),
    "adapters, offloaded, alone": (calls(actor_train="dp1") | {"offload": ["actor.optimizer"]}, {"peft_config": LORA}),
    "moved": (calls(actor_train="tp2"), {}),
}
EVALUATIONS = ("validate", "test", "predict")


def evaluate(name: str, folder: Path) -> dict[str, Any]:
    """Train under a plan; evaluate the model and its checkpoint in another Trainer, both with and without averages."""
    world_size, (plan, settings) = runs.world_size(), HELD[name]
    found: dict[str, Any] = {}
    batches = Batches(3, responses=True)
    for averages in (True, False):
        weights, module = Weights(), runs.sft(optimizer=OPTIMIZERS["adam"], **settings)
        trainer = runs.trainer(ReallocStrategy(plan), world_size, callbacks=[weights, EMA(DECAY, validate=averages)])
        trainer.fit(module, batches)
        path = folder / f"{averages}"
        trainer.save_checkpoint(path)
        for evaluation in EVALUATIONS if averages else EVALUATIONS[1:2]:
            getattr(trainer, evaluation)(module, batches)
        found[f"last {averages}"], found[f"here {averages}"] = whole(trainer.strategy), weights.validated[::3]
        found["trained"] = weights.trained
        if averages:  # the checkpoint, and the model that was read from it
            trainer.test(module, batches, ckpt_path=path, verbose=False)
            trainer.test(module, batches, verbose=False)
            found["reread"] = weights.validated[9::3]
        later = Weights()
        trainer = runs.trainer(ReallocStrategy(plan), world_size, callbacks=[later, EMA(DECAY, validate=averages)])
        trainer.test(runs.sft(**settings), batches, ckpt_path=path, verbose=False)
        found[f"read {averages}"] = later.validated[0]
    return found


@pytest.mark.parametrize("name", matrix(HELD, "adapters, offloaded, alone"))
def test_averages_are_evaluated_after_training_and_from_checkpoints(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    world_size = 1 if "alone" in name else 2
    found = workers.run(evaluate, name, tmp_path, world_size=world_size, init_process_group=False, deadline_s=120.0)[0]
    expected, *later = found["trained"]
    for now in later:
        expected = {key: torch.lerp(expected[key], now[key], 1 - DECAY) for key in now}
    last = found["trained"][-1]
    assert runs.largest_difference(expected, last) > 1e-3, "the test averages what does not change"
    assert len(found["reread"]) == 2
    assert all(runs.largest_difference(each, expected) <= 1e-6 for each in found["reread"])
    for averages, held in ((True, expected), (False, last)):
        evaluated = found[f"here {averages}"]
        assert len(evaluated) == (3 if averages else 1)
        assert all(runs.largest_difference(each, held) <= 1e-6 for each in evaluated)
        assert runs.largest_difference(found[f"last {averages}"], last) <= 1e-6, "the weights came back"
        assert runs.largest_difference(found[f"read {averages}"], held) <= 1e-6


def train_with_an_offloaded_optimizer() -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the weights after every iteration, and the averages at the end."""
    plan = calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1") | {"offload": ["actor.optimizer"]}
    weights = Weights()
    trainer = runs.trainer(ReallocStrategy(plan), 1, callbacks=[weights, EMA(DECAY)])
    trainer.fit(runs.grpo(optimizer=OPTIMIZERS["adam"]), Batches(3))
    with trainer.strategy.averages.in_place_of_weights("actor"):
        return weights.trained, whole(trainer.strategy)


def test_averages_stay_updated_while_other_calls_run(workers: WorkerPool) -> None:
    ((trained, averages),) = workers.run(train_with_an_offloaded_optimizer, world_size=1, init_process_group=False)
    expected, *later = trained
    for now in later:
        expected = {key: torch.lerp(expected[key], now[key], 1 - DECAY) for key in now}
    assert runs.largest_difference(expected, trained[-1]) > 1e-3, "the test averages what does not change"
    assert runs.largest_difference(averages, expected) <= 1e-6


def resume(folder: Path) -> None:
    """Train four iterations, and repeat the last two under another layout."""
    world_size, half = runs.world_size(), folder / "straight-2"
    saving = SaveAt(Part(None, 4, save=folder / "straight", save_at=(2,)))
    for name, layout, path, others in (("straight", "fsdp2", None, [saving]), ("resumed", "tp2", half, [])):
        trainer = runs.trainer(
            ReallocStrategy(calls(actor_train=layout)), world_size, max_steps=4, max_epochs=-1,
            callbacks=[EMA(DECAY), *others],
        )  # fmt: skip
        loader = BatchLoader(table(responses=True), batch_size=BATCH_SIZE, seed=5)
        trainer.fit(runs.sft(optimizer=OPTIMIZERS["adam"]), loader, ckpt_path=path)
        trainer.save_checkpoint(folder / name)


@pytest.mark.exhaustive  # averages of every layout: above
def test_averages_are_resumed_in_another_layout(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(resume, tmp_path, world_size=2, init_process_group=False, deadline_s=90.0)
    straight, resumed, half = (
        {name: tensor for name, tensor in contents(tmp_path / run).items() if name.endswith(f"//{AVERAGE}")}
        for run in ("straight", "resumed", "straight-2")
    )
    assert straight and runs.largest_difference(resumed, straight) <= 1e-5
    assert runs.largest_difference(half, straight) > 1e-4


def test_a_weight_without_gradients_is_its_own_average() -> None:
    used, unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([used, unused], lr=0.5, weight_decay=0.0)
    update_averages(optimizer, 0.5, may_begin=False)
    assert not optimizer.state, "an optimizer makes its state only where there is none"
    used.grad = torch.ones(2)
    optimizer.step()
    update_averages(optimizer, 0.5, may_begin=True)
    assert AVERAGE in optimizer.state[used] and not optimizer.state.get(unused)
    assert optimizer.state[used][AVERAGE].tolist() == pytest.approx([0.5, 0.5])
    optimizer.step()
    update_averages(optimizer, 0.5, may_begin=True)
    assert optimizer.state[used][AVERAGE].tolist() == pytest.approx([0.25, 0.25])
    unused.grad = torch.ones(2)
    optimizer.step()
    # Averages of bfloat16 weights are float32: a step of a thousandth would be rounded away.
    half = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    plain = SGD([half], lr=1.0)
    update_averages(plain, 0.999, may_begin=True)
    half.data.fill_(2.0)
    update_averages(plain, 0.999, may_begin=True)
    assert plain.state[half][AVERAGE].item() == pytest.approx(1.001)


def refused(kind: str, folder: Path) -> str:
    """Return the error of a run that cannot average."""
    callbacks: dict[str, list[Callback]] = {
        "lightning": [EMAWeightAveraging()], "role": [EMA(roles=["reference"])],
        "none": [SaveHuggingFace(folder, averaged=True)],
        "early": [EMA(start_step=9), SaveHuggingFace(folder, averaged=True)],
    }  # fmt: skip
    try:
        runs.train(runs.grpo(), "heuristic", 1, Batches(1), callbacks=callbacks[kind])
    except ConfigError as error:
        return str(error)
    return "it ran"


def test_averages_that_cannot_be_computed_are_refused(workers: WorkerPool, tmp_path: Path) -> None:
    for kind, message in (
        ("lightning", "EMAWeightAveraging copies RecordedGRPO before its models are divided over ranks, and its copy "
                      "cannot follow them; use lightning_realloc.EMA(decay=...)"),
        ("role", "EMA(roles=...) names reference; name trained roles: actor"),
        ("none", "SaveHuggingFace(averaged=True) writes an EMA's averages; add EMA() to the callbacks"),
        ("early", "there is no average of actor's weights to write; add the callback EMA(), and train for an iteration "
                  "before the first folder is written"),
    ):  # fmt: skip
        assert workers.run(refused, kind, tmp_path / kind, world_size=1, init_process_group=False) == [message]
    for settings in ({"decay": 1.0}, {"every_n_steps": 0}, {"start_step": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))}=.* must"):
            EMA(**settings)  # type: ignore[arg-type]
    workers.run(_save_without, tmp_path / "run", world_size=1, init_process_group=False)
    with pytest.raises(CheckpointError, match="holds no averages of 'actor': it was trained without the callback EMA"):
        export_checkpoint(tmp_path / "run", tmp_path / "new", averaged=True)


def _save_without(folder: Path) -> None:
    trainer = runs.trainer(ReallocStrategy("heuristic"), 1)
    trainer.fit(runs.sft(), Batches(1, responses=True))
    trainer.save_checkpoint(folder)
