"""Training a vision-language model on prompts with images gives the results of one rank in every layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome, calls
from tests.vision_models import VISION_FAMILIES, prompt_with_images, tiny_vision_model
from tests.workers import WorkerPool

PLANS = {
    "tp": calls(actor_train="dp2.tp2", actor_generate="dp4", reference_infer="tp2@2-3"),
    "fsdp": calls(actor_train="fsdp4", actor_generate="dp2.tp2", reference_infer="fsdp2@0-1"),
    "pp": calls(actor_train="pp2.fsdp2", actor_generate="pp2.dp2", reference_infer="pp2@0-1"),
}


SEEDS: tuple[tuple[list[int], ...], ...] = (([], [1], [2], [3, 4, 5]), ([], [], [], [6]))
"""Seeds of the images of each prompt in each batch."""
CASES = [(family, plan) for family in VISION_FAMILIES for plan in PLANS]
FEW = [("qwen2_5_vl", "pp"), ("gemma3", "tp")]


class BatchesWithImages(Batches):
    """Batches whose prompts hold none, one or three images; two prompts have the same tokens and other images.

    The last batch has a single image, so most ranks have none.
    """

    def __init__(self, family: str) -> None:
        super().__init__(len(SEEDS), size=4)
        self.family = family

    def __iter__(self) -> Iterator[Samples]:
        for seeds, batch in zip(SEEDS, super().__iter__(), strict=True):
            made = [prompt_with_images(self.family, images) for images in seeds]
            columns: dict[str, Any] = {"prompt_ids": Ragged.from_list([tokens for tokens, _ in made])}
            for name, like in made[-1][1].items():
                columns[f"input/{name}"] = Ragged.from_list([extras.get(name, like[:0]) for _, extras in made])
            yield batch.with_columns(**columns)


def _train(family: str, plans: Sequence[Any]) -> list[Outcome]:
    world_size, found = runs.world_size(), []
    for plan in plans:
        module = runs.grpo(
            actor=tiny_vision_model(family), reference=tiny_vision_model(family, seed=1),
            optimizer=partial(SGD, lr=0.5),
        )  # fmt: skip
        found.append(runs.train(module, plan, world_size, BatchesWithImages(family)))
    return found


@pytest.mark.parametrize(("family", "plan"), matrix(CASES, *FEW))
def test_every_plan_gives_the_results_of_one_rank(workers: WorkerPool, family: str, plan: str) -> None:
    ((alone,),) = workers.run(_train, family, ["heuristic"], world_size=1, init_process_group=False)
    everyone = workers.run(_train, family, [PLANS[plan]], init_process_group=False, deadline_s=150.0)
    for outcomes in zip(*everyone, strict=True):
        runs.check_equal_to_one_rank(outcomes, alone)
