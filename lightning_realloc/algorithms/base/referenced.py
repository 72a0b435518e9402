"""Base of algorithms that compare an actor with a reference on given responses: both models and their scores.

The reference's scores of given responses never change. They can be computed once before the first step and stored with
the rows; then the reference's weights are released.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_realloc.algorithms.base.calls import infer
from lightning_realloc.algorithms.base.loaded_weights import ModelSource
from lightning_realloc.algorithms.base.module import ModuleSettings, MultiModelModule
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.vocabulary import own_tokenizer, require_same_vocabulary
from lightning_realloc.algorithms.settings import Unpack, check_type
from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.batch.samples import Column, Ragged, Samples
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.sources import is_stream
from lightning_realloc.errors import ConfigError
from lightning_realloc.runtime.parallel.packed_forward import token_logprobs

_CALL, _COLUMN = "reference.infer", "ref_logprobs"


class ReferencedSettings(ModuleSettings, total=False):
    """Types of the settings that subclasses pass on to :class:`ReferencedModule`, where they are documented."""

    reference: ModelSource | None
    precompute_reference: bool


class ReferencedModule(MultiModelModule):
    """A module that compares log-probabilities of given responses by an actor and by a reference.

    Args:
        actor: The policy: a Hugging Face name or folder, a config, or a module.
        reference: Model that log-probabilities are compared with; None: the actor as it was loaded.
        precompute_reference: Whether the reference scores all rows of the data module once before training, and is then
            released; otherwise it scores every batch. Losses are the same.
        settings: Settings of :class:`MultiModelModule`: learning rate, optimizer, schedule, tokenizer, training
            options, seed.
    """

    evaluation_calls: tuple[str, ...] = (_CALL, "actor.infer", "measure")
    share_prompts = True

    def __init__(
        self,
        actor: ModelSource,
        *,
        reference: ModelSource | None = None,
        precompute_reference: bool = False,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(**settings)
        check_type(bool, precompute_reference=precompute_reference)
        self.precompute_reference = precompute_reference
        self.sources["actor"] = actor
        if reference is not None:
            self.sources["reference"] = reference

    def roles(self) -> tuple[Role, ...]:
        """Return the actor and the reference."""
        actor = self.make_role("actor", trained=True)
        return actor, self.reference_of(actor, self.sources.get("reference"))

    def configure_model(self) -> None:
        """Build the models, after a check that a given reference reads the actor's tokens."""
        if not self.models() and "reference" in self.sources:
            actor, reference = self.roles()[:2]
            tokenizer = own_tokenizer(actor) if self._tokenizer is None else self._tokenizer
            way_out = "give reference= a model with the actor's tokenizer"
            require_same_vocabulary(reference, actor, tokenizer, way_out=way_out)
        super().configure_model()

    @infer("reference", needs="batch", produces=_COLUMN)
    def score_reference(self, reference: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the reference's log-probability of every response token."""
        return token_logprobs(reference, batch, only_responses=True).logprobs

    @infer("actor", needs="batch", produces="logprobs")
    def score(self, actor: nn.Module, batch: PackedBatch) -> Tensor:
        """Return the actor's log-probability of every response token, before the step."""
        return token_logprobs(actor, batch, only_responses=True).logprobs

    # ---- precomputed scores
    def setup(self, stage: str) -> None:
        """Raise for precomputed scores of rows that are not known in advance."""
        super().setup(stage)
        if stage == "fit" and self.precompute_reference:
            self._known_rows()

    def on_train_start(self) -> None:
        """Precompute the scores of all rows, and release the reference, if requested."""
        super().on_train_start()
        if not self.precompute_reference or self.answered_ahead:
            return
        data = self._known_rows()
        self._strategy.check_release("reference")
        for split, table in data.tables.items():
            data.add_columns(split, **self.reference_columns(table, data.batch_size * data.group_size))
        self._strategy.release("reference")
        self.answered_ahead = (_CALL,)
        self.evaluation_calls = tuple(name for name in self.evaluation_calls if name != _CALL)

    def runs(self, call: str, iteration: int) -> bool:
        """Leave out calls whose results were precomputed."""
        return call not in self.answered_ahead and super().runs(call, iteration)

    def check_batch(self, batch: Samples) -> None:
        """Raise for rows without precomputed scores after the reference was released."""
        super().check_batch(batch)
        if self.answered_ahead and _COLUMN not in batch:
            raise ConfigError(
                f"precompute_reference=True asked the reference about other rows than these and let it go; give the "
                f"data module of that fit, or a new {type(self).__name__}"
            )

    def reference_columns(self, table: Samples, batch_size: int) -> dict[str, Column]:
        """Return the columns to store with samples, from the reference, ``batch_size`` samples at a time."""
        return {_COLUMN: self.compute_ref_logprobs(table, batch_size)}

    def compute_ref_logprobs(self, table: Samples, batch_size: int) -> Ragged:
        """Return the reference's log-probabilities of every sample's response tokens, on the host."""
        found: list[Ragged] = []
        for begin in range(0, len(table), batch_size):
            batch = table.select(range(begin, min(begin + batch_size, len(table))))
            made = self._strategy.run_calls(batch, (_CALL,))
            found.append(made.by_ids(batch.ids).ragged(_COLUMN).to("cpu"))
        return Ragged.concatenate(found)

    def _known_rows(self) -> RowDataModule:
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, RowDataModule):
            raise ConfigError(
                f"precompute_reference=True keeps what the reference says with the rows of a data module, and this fit "
                f"has {'none' if data is None else type(data).__name__}; give PreferenceDataModule or "
                f"BinaryFeedbackDataModule, or set precompute_reference=False"
            )
        if is_stream(data.data):
            raise ConfigError(
                "precompute_reference=True asks the reference about all rows before the first step, and those of a "
                "stream are read as they are needed; set precompute_reference=False, or give the rows without streaming"
            )
        return data
