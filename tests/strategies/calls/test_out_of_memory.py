"""A call that runs out of device memory goes on with smaller micro-batches, or names the way out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from lightning_realloc import GenerationOptions
from lightning_realloc.errors import ReallocError
from lightning_realloc.generation.cache.kv_cache import SlotCache
from tests.devices import CPU_ALONE
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.runs import Batches
from tests.workers import WorkerPool

MAKERS: dict[str, Any] = {"sft": runs.sft, "dpo": preferences.dpo}


def limit_samples(module: Any, limit: int) -> list[int]:
    """Make the actor's loss raise for a micro-batch of more samples; return the sizes of all that ran."""
    loss_of, sizes = module.actor_loss, []

    def actor_loss(model: Any, batch: Any, totals: Any) -> Any:
        loss = loss_of(model, batch, totals)
        if len(batch) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        sizes.append(len(batch))
        return loss

    module.actor_loss = actor_loss
    return sizes


def data_for(name: str) -> Any:
    return preferences.pairs(3) if name == "dpo" else Batches(3, responses=True)


@pytest.mark.parametrize("name", MAKERS)
def test_one_rank_halves_its_micro_batches_and_trains_to_the_same_weights(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = runs.train(MAKERS[name](), "static", 1, data_for(name))
    module = MAKERS[name]()
    sizes = limit_samples(module, 2)
    with caplog.at_level(logging.WARNING, logger="lightning_realloc"):
        found = runs.train(module, "static", 1, data_for(name))
    assert max(sizes) <= 2 and len(sizes) > 3
    texts = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert texts[0].startswith("actor.train ran out of memory with ")
    assert len(set(texts)) == len(texts) <= 3  # once for every size, not in every step
    for ours, theirs in zip(found.logged, expected.logged, strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], rel=1e-5)
    assert runs.largest_difference(found.weights, expected.weights) <= 1e-5


@CPU_ALONE
def test_a_single_sample_without_room_is_an_error() -> None:
    module = runs.sft()
    limit_samples(module, 0)
    with pytest.raises(ReallocError, match=r"micro-batches of up to 1 samples and micro_batch_tokens=2048: lower"):
        runs.train(module, "static", 1, Batches(1, responses=True))


def fit_on_two() -> str:
    """Return the error if memory runs out on two ranks."""
    module = runs.sft()
    limit_samples(module, 2)
    with pytest.raises(ReallocError) as error:
        runs.train(module, "heuristic", 2, Batches(1, responses=True))
    return str(error.value)


def test_several_ranks_end_with_the_way_out(workers: WorkerPool) -> None:
    for told in workers.run(fit_on_two, world_size=2, init_process_group=False):
        assert "actor.train in layout" in told
        assert "lower micro_batch_tokens of the call in the plan or in TrainOptions" in told
        assert "divide rows over its ranks (cp2), " in told
        assert told.endswith("(CUDA out of memory. Tried to allocate 2.00 GiB.)")


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
ONE_RANK = runs.calls(actor_generate="dp1", reference_infer="dp1", actor_train="dp1")


def limited_reference(limit: int) -> tuple[Any, list[int]]:
    """Return GRPO whose reference runs out of memory for more samples at a time, and the sizes of all that ran."""
    module, sizes = runs.grpo(), []
    infer = module.score_reference

    def score_reference(model: Any, batch: Any) -> Any:
        if len(batch) > limit:
            raise FULL
        sizes.append(len(batch))
        return infer(model, batch)

    module.score_reference = score_reference
    return module, sizes


def test_inference_halves_its_micro_batches_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    expected = runs.train(runs.grpo(), ONE_RANK, 1, Batches(2))
    module, sizes = limited_reference(2)
    with caplog.at_level(logging.WARNING, logger="lightning_realloc"):
        found = runs.train(module, ONE_RANK, 1, Batches(2))
    assert max(sizes) <= 2
    assert found.tokens == expected.tokens
    assert runs.largest_difference(found.weights, expected.weights) <= 1e-5
    texts = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert 0 < len(texts) <= 3 and texts[0].startswith("reference.infer ran out of memory with ")
    module, _ = limited_reference(0)
    with pytest.raises(
        ReallocError, match=r"^reference.infer in layout dp1@0 ran out .* up to 1 samples .* lower micro_"
    ):
        runs.train(module, ONE_RANK, 1, Batches(2))


def test_inference_frees_kept_caches_before_it_works_on_less(caplog: pytest.LogCaptureFixture) -> None:
    module = runs.grpo(generation=GenerationOptions(free_cache=False))
    infer, has_failed, held = module.score_reference, [False], []

    def score_reference(model: Any, batch: Any) -> Any:
        engines = module.trainer.strategy.runner.engines
        held.append((engines.keeps_caches, [one.engine._cache.num_bytes > 0 for one in engines._engines.values()]))
        if not has_failed[0]:
            has_failed[0] = True
            raise FULL
        return infer(model, batch)

    module.score_reference = score_reference
    with caplog.at_level(logging.WARNING, logger="lightning_realloc"):
        runs.train(module, ONE_RANK, 1, Batches(2))
    assert held == [(True, [True]), (False, [False]), (False, [False])]
    texts = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert texts == ["memory ran out: caches and CUDA graphs are freed after each generation from now on"]


@pytest.mark.parametrize("name", ["_allocate", "make_room"])
def test_generation_without_room_names_the_ways_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise FULL

    monkeypatch.setattr(SlotCache, name, fails)
    with pytest.raises(ReallocError) as error:
        runs.train(runs.grpo(), ONE_RANK, 1, Batches(1))
    assert str(error.value) == (
        "actor.generate in layout dp1@0 ran out of memory: lower max_slots of the call in the plan, max_cache_bytes or "
        "max_new_tokens, offload other roles in the plan, or cut the weights over more ranks (CUDA out of memory. "
        "Tried to allocate 2.00 GiB.)"
    )
