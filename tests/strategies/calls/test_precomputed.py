"""A precomputed reference gives the same losses as one that runs in every iteration, and its weights are freed."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_realloc.data.feedback import BinaryFeedbackDataModule
from lightning_realloc.data.preferences import PreferenceDataModule
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.models import byte_tokenizer
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.checkpoints.checkpoint_runs import Part, SaveAt
from tests.strategies.runs import calls
from tests.workers import WorkerPool

PAIRS = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "x" * (1 + n % 3)} for n in range(15)]
PLANS = (
    calls(reference_infer="dp2", actor_infer="dp2", actor_train="fsdp2"),
    calls(reference_infer="dp1@1", actor_infer="tp2", actor_train="dp2"),
    calls(reference_infer="fsdp2", actor_infer="dp2", actor_train="dp2"),
)
CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "dpo": (preferences.dpo, {}, PreferenceDataModule),
    "by rank": (preferences.dpo, {"loss": "aot"}, PreferenceDataModule),
    "kto": (preferences.kto, {}, BinaryFeedbackDataModule),
    "kto from zero": (preferences.kto, {"loss": "apo_zero_unpaired"}, BinaryFeedbackDataModule),
}


class Watch(Callback):
    """Holds a weak reference to the reference model."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Store it before the first call."""
        self.reference: weakref.ref[nn.Module] = weakref.ref(pl_module.reference)


def data_of(module_class: Any, *, whole: bool = False) -> Any:
    """Return twelve pairs for training and three held-out pairs: with batches of four, the last one is smaller.

    ``whole`` puts all into one batch, in order: then KTO's mismatched responses come from all rows.
    """
    settings = {"batch_size": 24, "shuffle": False, "drop_last": False} if whole else {"batch_size": 4}
    return module_class(PAIRS[:12], val_data=PAIRS[12:], tokenizer=byte_tokenizer(), **settings)


def fitted(name: str, plan: Any, world_size: int, *, precompute: bool) -> dict[str, Any]:
    """Fit two epochs; return training and held-out metrics, and the number of reference passes, by name."""
    make, settings, data_class = CASES[name]
    module, data = make(precompute_reference=precompute, **settings), data_of(data_class, whole=name == "kto")
    record, watch, strategy = runs.Record(), Watch(), ReallocStrategy(plan)
    trainer = runs.trainer(strategy, world_size, callbacks=[record, watch], max_epochs=2)
    trainer.fit(module, datamodule=data)
    gc.collect()
    asked = strategy.runner.counts["reference.infer"]
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    elsewhere = ""
    try:
        trainer.validate(module, datamodule=data_of(data_class), verbose=False)
    except ConfigError as error:
        elsewhere = str(error)
    return {
        "logged": record.logged, "validated": validated, "asked": asked, "is_gone": watch.reference() is None,
        "bytes": sum(p.untyped_storage().nbytes() for p in module.reference.parameters()), "elsewhere": elsewhere,
    }  # fmt: skip


def both(name: str, plan: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit with a reference that runs in every iteration, and with a precomputed one."""
    world_size = runs.world_size()
    return fitted(name, plan, world_size, precompute=False), fitted(name, plan, world_size, precompute=True)


@pytest.mark.parametrize(
    ("name", "plan"),
    matrix(
        [("dpo", 0), ("dpo", 1), ("dpo", 2), ("by rank", 0), ("kto", 1), ("kto from zero", 2)],
    ),
)
def test_a_precomputed_reference_gives_the_same_losses_and_is_freed(name: str, plan: int, workers: WorkerPool) -> None:
    everyone = workers.run(both, name, PLANS[plan], world_size=2, init_process_group=False, deadline_s=120.0)
    for asked_always, asked_once in everyone:
        for one, other in zip(asked_always["logged"], asked_once["logged"], strict=True):
            assert one == pytest.approx(other, abs=1e-5, rel=1e-5)
        assert asked_once["validated"] == pytest.approx(asked_always["validated"], abs=1e-5, rel=1e-5)
        assert (asked_always["is_gone"], asked_once["is_gone"]) == (False, True)
        # One element remains for every parameter.
        assert asked_once["bytes"] < 1000
        assert asked_always["elsewhere"] == ""
        assert "about other rows than these and let it go" in asked_once["elsewhere"]
    # Passes over training and held-out data, in batches of four rows. KTO has a row for each side of a pair: 24 and 6.
    # With as many mismatched rows, in batches of 24, there are two and one.
    assert max(once["asked"] for _, once in everyone) == {"kto": 2 + 1, "kto from zero": 6 + 2}.get(name, 3 + 1)


class Asked(Callback):
    """Records the reference log-probabilities of every row."""

    def __init__(self) -> None:
        self.said: dict[int, list[list[float]]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Read the batch, which is complete on every rank."""
        said = batch.ragged("ref_logprobs").to_lists()
        self.said |= {sample: logprobs for sample, logprobs in zip(batch.ids.tolist(), said, strict=True)}


def resumed(name: str, folder: Path) -> list[dict[str, Any]]:
    """Fit two epochs, and repeat the last three iterations from a checkpoint in another layout."""
    world_size, found = runs.world_size(), []
    make, settings, data_class = CASES[name]
    for plan, path in ((PLANS[0], None), (PLANS[2], folder / "run")):
        module, data = make(precompute_reference=True, **settings), data_of(data_class)
        record, asked, strategy = runs.Record(), Asked(), ReallocStrategy(plan)
        saving = [SaveAt(Part(None, 6, save=folder / "straight", save_at=(3,)))] if path is None else []
        trainer = runs.trainer(strategy, world_size, callbacks=[record, asked, *saving], max_epochs=2)
        trainer.fit(module, datamodule=data, ckpt_path=None if path is None else folder / "straight-3")
        (validated,) = trainer.validate(module, datamodule=data, verbose=False)
        found.append({
            "logged": record.logged, "said": asked.said, "validated": validated,
            "asked": strategy.runner.counts["reference.infer"], "weights": strategy.full_weights("actor"),
        })  # fmt: skip
    return found


@pytest.mark.parametrize("name", matrix(["dpo", "kto from zero"], "dpo"))
def test_a_resumed_run_precomputes_again_and_continues_with_the_same_results(
    name: str, workers: WorkerPool, tmp_path: Path
) -> None:
    straight, again = workers.run(resumed, name, tmp_path, world_size=2, init_process_group=False)[0]
    assert 0 < len(again["logged"]) < len(straight["logged"])
    assert again["asked"] == straight["asked"] > 0  # computed again, since no checkpoint holds these log-probabilities
    for ours, theirs in zip(again["logged"], straight["logged"][-len(again["logged"]) :], strict=True):
        # The checkpoint does not hold the last validation metrics.
        learnt, others = ({n: v for n, v in one.items() if not n.startswith("val/")} for one in (ours, theirs))
        assert learnt == pytest.approx(others, abs=1e-5, rel=1e-5)
    for sample, said in again["said"].items():
        assert said == [pytest.approx(logprobs, abs=1e-5) for logprobs in straight["said"][sample]]
    assert again["validated"] == pytest.approx(straight["validated"], abs=1e-5, rel=1e-5)
    assert runs.largest_difference(again["weights"], straight["weights"]) <= 1e-5


def test_precomputing_a_reference_needs_a_data_module(workers: WorkerPool) -> None:
    (text,) = workers.run(fit_without_data_module, world_size=1, init_process_group=False)
    assert "keeps what the reference says with the rows of a data module, and this fit has none" in text


def fit_without_data_module() -> str:
    """Return the error of a fit on plain batches."""
    trainer = runs.trainer(ReallocStrategy("heuristic"), 1)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(preferences.dpo(precompute_reference=True), preferences.pairs())
    return str(caught.value)


def test_a_precomputed_reference_cannot_be_saved(workers: WorkerPool) -> None:
    (text,) = workers.run(fit_that_saves_frozen_roles, world_size=1, init_process_group=False)
    assert "save_frozen_roles=True writes the weights of 'reference' into checkpoints" in text


def fit_that_saves_frozen_roles() -> str:
    """Return the error of a fit that saves a reference which it frees."""
    trainer = runs.trainer(ReallocStrategy("heuristic", save_frozen_roles=True), 1)
    with pytest.raises(ConfigError) as caught:
        trainer.fit(preferences.dpo(precompute_reference=True), datamodule=data_of(PreferenceDataModule))
    return str(caught.value)
