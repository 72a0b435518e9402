"""SaveHuggingFace writes a model card without claims, and uploads to the hub only if a repository is named."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lightning_realloc.algorithms import SFT
from lightning_realloc.callbacks import SaveHuggingFace
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.checkpoints.model_card import MARK, ModelCard, make_model_card
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.workers import WorkerPool

CARD = ModelCard(
    title="mine", role="actor", algorithm="GRPO", steps=3, base="org/base", base_is_on_hub=True,
    settings={"kl_coef": "0.04", "odd": "a|b"},
)  # fmt: skip


# ---- the card
def test_a_card_describes_the_training_and_makes_no_claims() -> None:
    _, head, body = CARD.text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers", "base_model": "org/base", "tags": ["lightning-realloc", "grpo"],
    }  # fmt: skip
    assert "The actor of a run of GRPO, after 3 iterations. It began as `org/base`." in body
    assert "| kl_coef | `0.04` |" in body and r"| odd | `a\|b` |" in body
    assert "It was not evaluated here." in body


def test_a_card_of_the_user_is_kept_and_a_written_one_is_renewed(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    CARD.write(tmp_path)
    file.write_text(file.read_text().replace("after 3", "after 2"))
    CARD.write(tmp_path)
    assert MARK in file.read_text() and "after 3" in file.read_text()
    file.write_text("mine")
    CARD.write(tmp_path)
    assert file.read_text() == "mine"


def test_a_module_without_a_tokenizer_has_a_card() -> None:
    module = SFT(tiny_model("llama"), seed=3)
    made = make_model_card(runs.trainer(ReallocStrategy("static"), 1), module, "actor", title="mine", is_adapter=False)
    assert made.algorithm == "SFT" and made.settings["seed"] == "3"


# ---- a run, with a hub that records requests
class Hub:
    """Replacement of ``huggingface_hub.HfApi`` that records requests."""

    asked: list[tuple[Any, ...]]
    refuses = ""

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        """Record the request, or refuse it."""
        self._note("make", repo_id, private, exist_ok)

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], commit_message: str) -> None:
        """Record the request, or refuse it."""
        self._note("upload", repo_id, folder_path, tuple(allow_patterns), commit_message)

    def _note(self, what: str, *details: Any) -> None:
        type(self).asked.append((what, *details))
        if what == self.refuses:
            raise OSError("no network")


def fit(folder: Path, refuses: str, make: Callable[[], Any], **settings: Any) -> tuple[list[tuple[Any, ...]], str, int]:
    """Train and write; return the requests to the hub, the error, and the number of steps."""
    Hub.asked, Hub.refuses = [], refuses
    real, huggingface_hub.HfApi = huggingface_hub.HfApi, Hub  # type: ignore[assignment, misc]
    trainer = runs.trainer(
        ReallocStrategy("static"), runs.world_size(), max_steps=2, callbacks=[SaveHuggingFace(folder, **settings)]
    )
    refusal = ""
    try:
        trainer.fit(make(), runs.Batches(2, responses=make is not policy))
    except CheckpointError as error:
        refusal = str(error)
    finally:
        huggingface_hub.HfApi = real  # type: ignore[misc]
    return Hub.asked, refusal, trainer.global_step


def policy() -> Any:
    """Return an algorithm whose settings the card shows."""
    return runs.grpo(learning_rate=0.25, kl_coef=0.5)


def _fit(
    workers: WorkerPool, folder: Path, refuses: str = "", make: Callable[[], Any] = runs.sft, **settings: Any
) -> list[Any]:
    run = partial(fit, folder, refuses, make, **settings)
    return workers.run(run, world_size=2, init_process_group=False, deadline_s=120.0)


def test_by_default_nothing_is_uploaded_and_the_folder_is_complete(workers: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert _fit(workers, folder, make=policy) == [([], "", 2)] * 2

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert GenerationConfig.from_pretrained(folder).eos_token_id == model.config.eos_token_id == 2
    special = {name: getattr(byte_tokenizer(), name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    assert {name: getattr(tokenizer, name) for name in special} == special
    output = model.generate(**tokenizer("23+", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert output.shape[1] <= 5
    card = (folder / "README.md").read_text()
    assert "RecordedGRPO, after 2 iterations." in card
    for row in (
        "| kl_coef | `0.5` |", "| ranks | `2` |", "| optimizer | `AdamW(lr=0.25, betas=(0.9, 0.999), eps=1e-08,",
        "| ratio_to | `'behaviour'` |", "| policy_loss | `Clip()` |",
    ):  # fmt: skip
        assert row in card, card
    assert "learning_rate" not in card and str(tmp_path) not in card


def test_the_first_rank_uploads_the_written_files(workers: WorkerPool, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "diary.json").write_text("{}")
    everyone = _fit(workers, folder, push_to_hub="me/mine", every_n_steps=1)
    first, *others = [asked for asked, _, _ in everyone]
    assert others == [[]], "the first rank alone talks to the hub"
    made, (what, name, where, files, message) = first
    assert made == ("make", "me/mine", True, True)
    assert (what, name, where, message) == ("upload", "me/mine", folder, "Step 2")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
    assert "diary.json" not in files and not any("step-" in file for file in files)


@pytest.mark.parametrize(("refuses", "steps", "message"), [
    ("make", 0, "cannot write to 'me/mine' on the hub; name it 'user/model' and log in with `hf auth login`, or leave"),
    ("upload", 2, "but not on the hub; try `hf upload me/mine"),
])  # fmt: skip
def test_a_refusal_of_the_hub_is_reported_on_every_rank(
    workers: WorkerPool, tmp_path: Path, refuses: str, steps: int, message: str
) -> None:
    everyone = _fit(workers, tmp_path / "out", refuses, push_to_hub="me/mine")
    for _, refusal, taken in everyone:
        assert message in refusal and "(OSError: no network)" in refusal
        assert taken == steps
    assert (tmp_path / "out/model.safetensors").exists() == (refuses == "upload")


def test_an_upload_without_a_written_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set at_end=True"):
        SaveHuggingFace(tmp_path, push_to_hub="me/mine", at_end=False)
