"""The LightningModule that every algorithm extends.

It names models and calls, and builds the models with full weights. The strategy shards them and runs the calls.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from lightning.pytorch import Callback
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerState

from lightning_realloc.algorithms.base.adapters import (
    AdapterSource,
    refuse_unknown_roles,
    roles_with_adapters,
)
from lightning_realloc.algorithms.base.evaluation import EvaluatedModule, EvaluatingCallback
from lightning_realloc.algorithms.base.generation_options import GenerationOptions, check_engine
from lightning_realloc.algorithms.base.initial_weights import random_stream, starts_at_base
from lightning_realloc.algorithms.base.loaded_weights import ModelSource, without_weights
from lightning_realloc.algorithms.base.optimizers import (
    NoDecay,
    OptimizedRoles,
    RoleOptimizer,
    check_learning_rate,
)
from lightning_realloc.algorithms.base.quantization import LoadingOptions
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.rollout_columns import sample_rows
from lightning_realloc.algorithms.base.vocabulary import check_token_ids
from lightning_realloc.algorithms.settings import check_not_negative, check_type
from lightning_realloc.batch.samples import Samples, prompt_images
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.callbacks.progress.call_progress import CallProgress
from lightning_realloc.callbacks.run_log import RunLog
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.data.tokenizers import load_tokenizer, tokenizer_in
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import CheckpointError, ConfigError
from lightning_realloc.generation.core.capabilities import EngineName
from lightning_realloc.generation.loop.environment import Conversation
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.runtime.forward.attention.packable import check_packable
from lightning_realloc.runtime.forward.attention.packed_attention import check_segments
from lightning_realloc.runtime.forward.liger import use_liger_kernels
from lightning_realloc.runtime.forward.routers import check_balance
from lightning_realloc.runtime.model.model_classes import Task
from lightning_realloc.runtime.model.structure import TrainVision, check_extra_inputs, transformers_model
from lightning_realloc.seeds import seed_of_run
from lightning_realloc.setting_hints import HintTable, SuggestsSettings, refuses_unknown
from lightning_realloc.trainers import planned_iterations, trainer_callbacks

if TYPE_CHECKING:
    from lightning_realloc.generation import Speculation


class ModuleSettings(TypedDict, total=False):
    """Types of the settings that subclasses pass on to :class:`MultiModelModule`, where they are documented."""

    learning_rate: float | None
    optimizer: OptimizerCallable | None
    lr_scheduler: LRSchedulerCallable | None
    weight_decay: float | None
    no_decay: tuple[NoDecay, ...] | None
    optimizers: Mapping[str, RoleOptimizer] | None
    train_options: TrainOptions | None
    engine: EngineName
    speculation: Speculation | None
    peft_config: Any
    quantization_config: Any
    train_vision: TrainVision
    allow_missing: bool
    liger_kernels: bool
    seed: int | None
    generation: GenerationOptions | None
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None


class MultiModelModule(SuggestsSettings, OptimizedRoles, EvaluatedModule):
    """A LightningModule of several models that declares its calls and leaves running them to ``strategy="realloc"``.

    A subclass decorates its methods with ``@generate``, ``@infer``, ``@compute`` and ``@train`` and returns its models
    from :meth:`roles`. Every model becomes an attribute with the role's name in :meth:`configure_model`.

    Args:
        learning_rate: Learning rate of AdamW without weight decay, the default optimizer. None:
            ``default_learning_rate`` of the algorithm, ten times that for adapters: 2e-5 in SFT, 1e-5 in reward models,
            5e-7 in OnlineDPO, else 1e-6.
        optimizer: Function of the parameters that makes an optimizer with its own learning rate.
        lr_scheduler: Function of an optimizer that makes a learning-rate schedule, which steps once per iteration.
        weight_decay: Weight decay of all but ``no_decay``; None leaves it to ``optimizer``.
        no_decay: Kinds of weights that do not decay: ``norms``, ``biases``, ``embeddings``; None: the first two.
        optimizers: Trained role -> settings that differ for it.
        train_options: Epochs, mini-batches, micro-batches and clipping of a training call.
        engine: ``"native"``: continuous batching; ``"hf"``: the model's own ``generate``, for models that the native
            engine refuses; ``"vllm"``: vLLM next to each generating rank.
        speculation: Speculative decoding: draft several tokens, verify them at once; None: one token at a time.
        peft_config: Adapters to train: a ``LoraConfig``, a mapping with ``peft_type: LORA``, or a folder of saved ones,
            for every trained role; or role -> one of these.
        quantization_config: 4-bit weights under the adapters: a ``BitsAndBytesConfig(load_in_4bit=True)`` or the same
            as a mapping, for every trained role; or role -> one of these, also for roles that are not trained. None:
            weights as their folders hold them.
        train_vision: Trained parts that only images use: ``"none"``, the ``"projector"`` to the language model, or
            ``"all"``, the tower, too; with adapters, the parts that get some. Given modules without adapters keep their
            ``requires_grad``.
        allow_missing: Whether a folder may lack weights of its config (then random) or hold others. New heads may
            always be missing.
        liger_kernels: Use Liger's kernels; needs CUDA and the package liger-kernel.
        seed: Seed of random weights, sampling, dropout and mini-batch order; None: that of ``seed_everything``, else 0.
        generation: Further options of generation: bounds of its memory, samples that move between ranks, a budget.
        tokenizer: Tokenizer or processor, its name or folder; None: that of the first language model.
    """

    names_elsewhere = HintTable(
        "algorithm", generation=GenerationOptions, train_options=TrainOptions, conversation=Conversation
    )
    _tokenizer: PreTrainedTokenizerBase | None
    share_prompts: bool = False
    """Whether adjacent samples of a pack may share one copy of their prompt. Models must be causal, and methods find a
    token's predecessor by ``PackedBatch.predecessors``, as ``token_logprobs`` does."""
    group_size: int = 1
    """Number of adjacent samples that stay together, such as 2 for a chosen and a rejected response: in one
    micro-batch, in this order, and in one mini-batch. Batches hold whole groups."""
    totals_of: tuple[str, ...] = ()
    """Columns of one number per sample whose sums over a mini-batch a loss gets in ``totals.sums``: those of
    the batch or, if responses are generated, of the generating call. Other calls' are not known on all ranks."""
    supports_rollout_budget: bool = False
    """Whether unfinished responses can continue in the next iteration, as a ``rollout_budget`` needs."""
    dropout: bool = False
    """Whether dropout is active in training. It is off for policies, which are sampled without it."""

    @refuses_unknown
    def __init__(
        self,
        *,
        learning_rate: float | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        weight_decay: float | None = None,
        no_decay: tuple[NoDecay, ...] | None = None,
        optimizers: Mapping[str, RoleOptimizer] | None = None,
        train_options: TrainOptions | None = None,
        engine: EngineName = "native",
        speculation: Speculation | None = None,
        peft_config: Any = None,
        quantization_config: Any = None,
        train_vision: TrainVision = "none",
        allow_missing: bool = False,
        liger_kernels: bool = False,
        seed: int | None = None,
        generation: GenerationOptions | None = None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_type(TrainOptions, train_options=train_options)
        check_type(GenerationOptions, generation=generation)
        check_type(bool, allow_missing=allow_missing, liger_kernels=liger_kernels)
        check_learning_rate(learning_rate, optimizer)
        self.learning_rate = learning_rate
        self.train_options = train_options or TrainOptions()
        self.engine = engine
        self.speculation = speculation
        self.generation_options = generation or GenerationOptions()
        self._check_generation()
        self.peft_config = peft_config
        self.loading = LoadingOptions(
            quantization_config=quantization_config, allow_missing=allow_missing, train_vision=train_vision
        )
        self.liger_kernels = liger_kernels
        check_type(Integral, seed=seed)
        self._seed = seed
        if learning_rate is not None:
            check_not_negative(learning_rate=learning_rate)
        self.optimizer_settings = RoleOptimizer(
            optimizer=optimizer, lr_scheduler=lr_scheduler, weight_decay=weight_decay, no_decay=no_decay
        )
        self.role_optimizers = dict(optimizers or {})
        self.tokenizer = tokenizer
        self.sources: dict[str, ModelSource] = {}
        """Role -> source of its weights. A dict keeps given modules out of this module's children. Once all roles are
        built, only shapes are kept."""

    def _check_generation(self) -> None:
        check_engine(self.engine, self.generation_options, self.speculation)
        budget = self.generation_options.rollout_budget
        if budget is not None and not self.supports_rollout_budget:
            raise ConfigError(
                f"{budget} continues responses in the next iteration, and {type(self).__name__} has none that could; "
                f"leave rollout_budget out of generation"
            )

    @classmethod
    def check_settings(cls, settings: Mapping[str, object]) -> None:
        """Refuse unknown settings, and adapters of unknown roles."""
        super().check_settings(settings)
        if cls.__module__.startswith("lightning_realloc."):  # other classes may have roles without declared calls
            adapted = settings.get("peft_config")
            calls = cls.calls_for([str(name) for name in roles_with_adapters(adapted)])
            known = (role for call in calls if call.role is not None for role in (call.role, *call.further_roles))
            refuse_unknown_roles(adapted, list(dict.fromkeys(known)))

    @property
    def seed(self) -> int:
        """Seed of random weights, sampling, dropout and mini-batch order; the same on every rank."""
        return seed_of_run(self._trainer) if self._seed is None else self._seed

    @property
    def replays_experts(self) -> bool:
        return self.generation_options.router_replay

    @property
    def has_environment(self) -> bool:
        """Whether samples wait for an environment while they are generated."""
        return False

    # ---- for subclasses
    def train_options_of(self, role: str) -> TrainOptions:
        """Return the training options of a role."""
        return self.train_options

    def peft_of(self, role: str, *, trained: bool = True) -> AdapterSource | None:
        """Return the adapters that ``peft_config`` gives a role. A role that is not trained gets them only by name."""
        config = self.peft_config
        if isinstance(config, Mapping) and "peft_type" not in config:
            return config.get(role)
        return config if trained else None

    def make_role(self, name: str, *, trained: bool, task: Task = "causal_lm") -> Role:
        """Return a role with the weights of ``sources[name]``, and the adapters and quantization that settings give."""
        return Role(
            name=name,
            source=self.sources[name],
            trained=trained,
            task=task,
            peft=self.peft_of(name, trained=trained),
            quantization=self.loading.quantization_of(name, trained=trained),
            train_vision=self.loading.train_vision,
        )

    def reference_of(self, actor: Role, source: ModelSource | None) -> Role:
        """Return a frozen reference from ``source``, or the actor's initial weights.

        New adapters change nothing at first, so it is the base then, without a second copy. Saved ones are merged into
        a copy, unless ``source`` is the actor's base by name.
        """
        peft = self.peft_of("reference", trained=False)
        if peft is None and actor.has_adapters:
            own = self.loading.quantization_of("reference", trained=False)
            is_base = own is None and isinstance(source, str | Path) and str(source) == str(actor.source)
            if is_base or (source is None and starts_at_base(actor)):
                return Role(name="reference", source=actor.source, trained=False, shares=actor.name)
            peft = actor.peft if source is None else None
        return Role(
            name="reference",
            source=actor.source if source is None else source,
            trained=False,
            peft=peft,
            quantization=self.loading.quantization_of("reference", trained=False),
        )

    def with_carried(self, batch: Samples) -> Samples:
        """Return the prompts of an iteration: the loader's batch, and prompts with unfinished responses.

        The same on every rank.
        """
        return batch

    def on_samples_carried(self, samples: Samples | None, *, num_learnt: int) -> None:
        """Store the samples that generating calls left for the next iteration; None: there are none.

        Every rank gets the same. ``num_learnt`` samples were trained on.
        """

    def on_iteration_end(self, samples: Samples) -> None:
        """Update state between iterations, from the samples that :meth:`summarize` gets.

        Every rank gets the same samples, so state is equal on all ranks. Buffers are part of checkpoints.
        """

    def _added_calls(self, calls: Sequence[ModelFunctionCall]) -> tuple[ModelFunctionCall, ...]:
        """Return the generating call of a callback that has the actor respond, if no call of an iteration generates."""
        asks = self._trainer is not None and any(
            isinstance(one, EvaluatingCallback) for one in trainer_callbacks(self._trainer)
        )
        generates = any(call.kind == "generate" and call.role == "actor" for call in calls)
        if not asks or generates or all(role.name != "actor" for role in self.roles()):
            return ()
        return (
            ModelFunctionCall("actor.generate", "generate", "actor", "evaluation_rollout", ("batch",), ("rollout",)),
        )

    # ---- derived
    def models(self) -> dict[str, nn.Module]:
        """Return role name -> model, for the models that are built."""
        return {role.name: getattr(self, role.name) for role in self.roles() if hasattr(self, role.name)}

    def tokenizer_of(self, role: str) -> PreTrainedTokenizerBase:
        """Return the tokenizer of a role that generates: the algorithm's, unless a partner has its own."""
        return self.tokenizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The given tokenizer; else that of the first language model from a name or folder."""
        if self._tokenizer is None:
            # Not a classifier's, if there is a language model: its vocabulary may differ.
            roles = self.roles()
            speakers = [role for role in roles if role.task == "causal_lm"] or roles
            sources = [role.source for role in speakers if isinstance(role.source, str | Path)]
            if not sources:
                raise ConfigError(
                    f"{type(self).__name__} was given no tokenizer, and no model is loaded from a folder or name that "
                    f"could have one; pass tokenizer="
                )
            self._tokenizer = load_tokenizer(sources[0])
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | ProcessorMixin | str | Path | None) -> None:
        self.processor = tokenizer if isinstance(tokenizer, ProcessorMixin) else None
        """Processor that was given in place of a tokenizer, for models of images."""
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer_in(tokenizer)
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer

    # ---- Lightning's hooks
    def configure_callbacks(self) -> list[Callback]:
        """Return a `RunLog` and a `CallProgress`, unless the Trainer has one."""
        given = trainer_callbacks(self.trainer)
        missing = [kind() for kind in (RunLog, CallProgress) if not any(isinstance(one, kind) for one in given)]
        return [*super().configure_callbacks(), *missing]

    def setup(self, stage: str) -> None:
        """Start reward functions, so that they fail before weights are loaded."""
        super().setup(stage)
        for functions in self.kept_reward_functions():
            functions.trainer_state = self.trainer_state
            functions.start()

    def release(self) -> None:
        """Close reward functions. The strategy calls it at the end of a run, also after an exception."""
        for functions in self.kept_reward_functions():
            functions.close()

    def configure_model(self) -> None:
        """Build every model that does not exist yet; Lightning calls it again before validate and test."""
        self._check_named_roles()
        self._unregister_sources()
        # A strategy divides models. A subclass of a user that extends this method may change weights: in float32.
        divides = self._trainer is not None and type(self).configure_model.__module__.startswith("lightning_realloc.")
        placed = self.dataflow.roles if divides else ()
        roles, packed_roles, packing = self.roles(), self.packed_roles, []
        for role in roles:
            if role.shares is None and not hasattr(self, role.name):
                deferred = role.name in placed
                model = role.build(
                    seed=self.seed + random_stream(role, roles),
                    allow_missing=self.loading.allow_missing,
                    deferred=deferred,
                )
                if role.trained:
                    check_balance(model, self.train_options_of(role.name), role.name)
                if self.liger_kernels:
                    use_liger_kernels(model, role.name, self._strategy.root_device)
                setattr(self, role.name, model)
                if role.name in packed_roles:
                    packing.append(model)
        check_segments(packing)
        self.sources.update({role: without_weights(source) for role, source in self.sources.items()})

    def _unregister_sources(self) -> None:
        """Remove a subclass's attributes that are sources of roles from this module's children and checkpoints."""
        roles = self.roles()
        for name, child in list(self._modules.items()):
            if any(child is role.source for role in roles) and all(name != role.name for role in roles):
                del self._modules[name]
                vars(self)[name] = child

    def _check_named_roles(self) -> None:
        config, trained = self.peft_config, self.dataflow.trained_roles
        refuse_unknown_roles(config, [role.name for role in self.roles()])
        self.loading.check_roles(self.roles(), type(self).__name__)
        for role in self.roles():
            if role.peft is None and self.peft_of(role.name, trained=role.trained) is not None:
                raise ConfigError(
                    f"peft_config={config!r} gives {role.name} adapters, and its Role has peft=None; write "
                    f"Role(name={role.name!r}, ..., peft=self.peft_of({role.name!r})) in roles() of "
                    f"{type(self).__name__}, or name only roles that have adapters: peft_config={{role: configuration}}"
                )
        if unknown := sorted(self.role_optimizers.keys() - set(trained)):
            raise ConfigError(
                f"optimizers names {', '.join(unknown)}, and the trained roles are {', '.join(trained) or 'none'}; "
                f"write trained role: settings"
            )

    def on_fit_start(self) -> None:
        """Check models and known rows, and silence Lightning's warnings about what calls set themselves."""
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        warnings.filterwarnings("ignore", message=r".*FSDP2-wrapped module .* returned a view tensor")
        # It advises to save weights from before the step. Checkpoints of an iteration hold those after it.
        warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization and every_n_train")
        packed_roles = self.packed_roles
        for role, model in self.models().items():
            if role in packed_roles:
                check_packable(model)
        data = getattr(self.trainer, "datamodule", None)
        for split, table in data.tables.items() if isinstance(data, RowDataModule) else ():
            self._check_token_ids(table, kinds=("generate", "infer", "train"))
            shown = next((images.inputs for images in prompt_images(table) if images is not None), {})
            for role, model in self.models().items() if shown else ():
                if role in packed_roles:
                    check_extra_inputs(transformers_model(model), shown)
            if split == "train" or self.trainer.limit_val_batches:
                for functions in self.kept_reward_functions():
                    functions.check_columns(table.data, "data" if split == "train" else "held-out data")

    @property
    def packed_roles(self) -> tuple[str, ...]:
        """Roles that a fit runs on packed sequences; none outside a fit."""
        fits = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        flow = self.dataflow
        return tuple(role for role in flow.roles if fits and self._packs(flow.calls_of(role)))

    def _packs(self, calls: Iterable[ModelFunctionCall]) -> bool:
        """Return whether a method of this package runs one of a role's calls on packed sequences.

        The engine would refuse some of these models with the advice to use another engine, which helps nothing.
        """
        packing = (getattr(self, call.method) for call in calls if call.kind != "generate")
        return any(getattr(method, "func", method).__module__.startswith("lightning_realloc.") for method in packing)

    def require_batch(self, batch: object) -> None:
        """Raise DataError for missing columns, and for token ids outside a model's embeddings."""
        super().require_batch(batch)
        assert isinstance(batch, Samples)
        self._check_token_ids(batch, kinds=("infer", "train"))  # the engine checks prompts itself

    def _check_token_ids(self, samples: Samples, *, kinds: tuple[str, ...]) -> None:
        models = self.models()
        readers = {str(call.role) for call in self.dataflow.model_calls if call.kind in kinds and "batch" in call.needs}
        check_token_ids(samples, {role: models[role] for role in readers if role in models})

    def training_step(self, batch: Samples, batch_idx: int) -> None:
        """Run one iteration of the dataflow."""
        self.require_batch(batch)
        self.check_batch(batch)
        for samples in self._strategy.run_iteration(self.with_carried(self.prepare_batch(batch))):
            self.log_dict(self.summarize(samples), prog_bar=True, batch_size=len(samples))
            self.on_iteration_end(samples)

    def sample_rows(self, samples: Samples) -> list[dict[str, object]]:
        """Return samples as rows for tables and files: prompt, response, rewards, the data's columns."""
        return sample_rows(samples, self.tokenizer)

    def kept_reward_functions(self) -> list[RewardFunctions]:
        """Return the reward functions that are attributes of the algorithm."""
        return [kept for kept in vars(self).values() if isinstance(kept, RewardFunctions)]

    def trainer_state(self) -> TrainerState:
        """Return the run's state as transformers has it: the steps that the run will take, and a fraction of epochs."""
        trainer = self.trainer
        batches, done = trainer.num_training_batches, trainer.fit_loop.epoch_loop.batch_progress.current.completed
        # After fit, Lightning keeps the last epoch's progress and has counted this epoch.
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        part = done / batches if is_fitting and 0 < batches < math.inf else 0.0
        return TrainerState(
            global_step=trainer.global_step,
            max_steps=planned_iterations(trainer) or 0,
            epoch=trainer.current_epoch + part,
        )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise CheckpointError: only a strategy can read a checkpoint, which is a folder of shards.

        Raises:
            CheckpointError: always, with the alternatives.
        """
        raise CheckpointError(
            f"{cls.__name__} is not built from a checkpoint; to go on training give {checkpoint_path} as "
            f"trainer.fit(..., ckpt_path=...), to use its weights write them with "
            f"'lightning-realloc export {checkpoint_path} --output DIR' and give DIR as the model"
        )
