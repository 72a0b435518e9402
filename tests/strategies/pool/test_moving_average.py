"""A reference that is a moving average of the actor, in any layouts of the two."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.strategies import ReallocStrategy
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

RATE = 0.25
PLANS = (
    calls(actor_train="fsdp2@0-1", actor_generate="dp2@0-1", reference_infer="tp2@2-3"),
    calls(actor_train="tp2@2-3", actor_generate="dp4", reference_infer="fsdp4"),
    calls(actor_train="dp2.fsdp2", actor_generate="dp4", reference_infer="dp4"),
)


class Averaged(runs.RecordedGRPO):
    """GRPO whose reference is a moving average of the actor."""

    trained = "actor"

    def roles(self) -> tuple[Role, ...]:
        """Return GRPO's roles with another reference."""
        actor, reference = super().roles()
        return actor, replace(reference, average_of=self.trained, average_rate=RATE)


class Weights(runs.Record):
    """Records the actor's full weights after every iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Gather the weights."""
        super().on_train_batch_end(trainer, *args)
        self.actors.append(trainer.strategy.full_weights("actor"))


def _make(module_class: type = Averaged) -> Any:
    from tests.models import byte_tokenizer, tiny_model

    return module_class(
        tiny_model("llama"), runs.low_tokens, reference=tiny_model("llama", seed=1), sampling=runs.SAMPLING,
        tokenizer=byte_tokenizer(), optimizer=partial(SGD, lr=1.0),
    )  # fmt: skip


def follow(plans: list[Any], folder: Path | None) -> list[tuple[list[dict[str, Tensor]], dict[str, Tensor], Any]]:
    """Train under each plan; return the actor after every iteration, the final reference, and the metrics."""
    found, world_size = [], runs.world_size()
    for plan in plans:
        strategy, weights = ReallocStrategy(plan), Weights()
        module = _make()
        trainer = runs.trainer(strategy, world_size, callbacks=[weights])
        trainer.fit(module, Batches(2))
        reference = strategy.full_weights("reference")
        if folder is not None:
            trainer.save_checkpoint(folder)
        found.append((weights.actors, reference, weights.logged))
    return found


@pytest.mark.parametrize("numbers", matrix(["0", "1 2"], "0"))
def test_the_reference_is_the_moving_average_of_the_actor(workers: WorkerPool, tmp_path: Path, numbers: str) -> None:
    from tests.models import tiny_model

    (alone,) = workers.run(follow, ["heuristic"], None, world_size=1, init_process_group=False, deadline_s=90.0)
    plans = [PLANS[int(number)] for number in numbers.split()]
    together = workers.run(
        follow, plans, tmp_path / "run.ckpt", world_size=4, init_process_group=False, deadline_s=120.0
    )
    for actors, reference, _ in (*alone, *together[0]):
        expected = {name: weight.detach() for name, weight in tiny_model("llama", seed=1).named_parameters()}
        for actor in actors:
            expected = {name: torch.lerp(expected[name], actor[name], RATE) for name in expected}
        assert runs.largest_difference(reference, expected) <= 1e-6
    for _, reference, logged in together[0]:
        assert runs.largest_difference(reference, alone[0][1]) <= 1e-5
        assert logged[-1] == pytest.approx(alone[0][2][-1], abs=1e-5, rel=1e-5)
    # A run that resumes from a checkpoint needs the current reference.
    reads = workers.run(_resume, tmp_path / "run.ckpt", world_size=1, init_process_group=False, deadline_s=90.0)
    assert runs.largest_difference(reads[0], together[0][-1][1]) == 0.0


def _resume(folder: Path) -> dict[str, Tensor]:
    strategy = ReallocStrategy("heuristic")
    runs.trainer(strategy, 1, max_epochs=1).fit(_make(), Batches(2), ckpt_path=folder)
    return strategy.full_weights("reference")


class AverageOfNobody(Averaged):
    """An average of a role that is not trained."""

    trained = "critic"


def _refused() -> str:
    with pytest.raises(PlanError) as caught:
        runs.trainer(ReallocStrategy("heuristic"), 1).fit(_make(AverageOfNobody), Batches(1))
    return str(caught.value)


def test_only_trained_roles_are_averaged_and_only_by_others(workers: WorkerPool) -> None:
    (message,) = workers.run(_refused, world_size=1, init_process_group=False)
    assert message == "role 'reference' is the average of 'critic', which is not trained; trained are actor"
    with pytest.raises(ConfigError, match="a moving average is not trained"):
        Role(name="reference", source=torch.nn.Linear(1, 1), trained=True, average_of="actor")
