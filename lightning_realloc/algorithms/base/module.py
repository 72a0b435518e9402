"""The LightningModule that every algorithm extends: it names its models and calls.

It builds plain modules with full weights. The strategy shards and moves them, runs the calls and takes the steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypedDict

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerState

from lightning_realloc.algorithms.base.adapters import AdapterSource
from lightning_realloc.algorithms.base.calls import declared_calls
from lightning_realloc.algorithms.base.evaluation import EvaluatedModule
from lightning_realloc.algorithms.base.generation_options import EngineName, GenerationOptions, SampleReallocation
from lightning_realloc.algorithms.base.optimizers import NoDecay, Parameters, RoleOptimizer, chosen_for, state_bytes
from lightning_realloc.algorithms.base.role import ModelSource, Role, Task, without_weights
from lightning_realloc.algorithms.base.sample_rows import sample_rows
from lightning_realloc.algorithms.base.vocabulary import check_token_ids
from lightning_realloc.algorithms.settings import check_type, refuse_contradictions
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.data.chat import load_tokenizer
from lightning_realloc.data.data_module import RowDataModule
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.errors import CheckpointError, ConfigError, PlanError
from lightning_realloc.generation import Speculation
from lightning_realloc.rewards.functions import RewardFunctions
from lightning_realloc.runtime.forward.liger import use_liger_kernels
from lightning_realloc.seeds import seed_of_run
from lightning_realloc.setting_hints import ALGORITHM_HINTS, SuggestsSettings

_ADAPTERS_LEARN_FASTER = 10.0
"""Than whole weights, at their best. Source: Schulman et al., "LoRA without regret", 2025."""


class ModuleSettings(TypedDict, total=False):
    """Types of the settings that subclasses pass on to :class:`MultiModelModule`, which documents them."""

    learning_rate: float | None
    optimizer: OptimizerCallable | None
    lr_scheduler: LRSchedulerCallable | None
    weight_decay: float | None
    no_decay: tuple[NoDecay, ...] | None
    optimizers: Mapping[str, RoleOptimizer] | None
    train_options: TrainOptions | None
    engine: EngineName
    speculation: Speculation | None
    max_cache_bytes: int | None
    sample_reallocation: SampleReallocation
    peft_config: Any
    allow_missing: bool
    liger_kernels: bool
    seed: int | None
    generation: GenerationOptions | None
    tokenizer: PreTrainedTokenizerBase | str | Path | None


class MultiModelModule(SuggestsSettings, EvaluatedModule):
    """A LightningModule of several models that declares its calls and leaves running them to ``strategy="realloc"``.

    A subclass decorates its methods with ``@generate``, ``@infer``, ``@compute`` and ``@train`` and returns its models
    from :meth:`roles`. Every model becomes an attribute with the role's name in :meth:`configure_model`.

    Args:
        learning_rate: Learning rate of AdamW without weight decay, the default optimizer. None:
            ``default_learning_rate`` of the algorithm, ten times that for adapters.
        optimizer: Function of the parameters that makes an optimizer, with its own learning rate: leave
            ``learning_rate`` out.
        lr_scheduler: Function of an optimizer that makes a learning-rate schedule, which steps once per iteration.
        weight_decay: Weight decay of all but ``no_decay``; None leaves it to ``optimizer``.
        no_decay: Kinds of weights that do not decay: ``norms``, ``biases``, ``embeddings``; None: the first two.
        optimizers: Trained role -> settings that differ for it.
        train_options: Epochs, mini-batches, micro-batches and clipping of a training call.
        engine: ``"native"``: continuous batching; ``"hf"``: the model's own ``generate``, for models that the native
            engine refuses.
        speculation: Speculative decoding: draft several tokens, verify them at once; None: one token at a time.
        max_cache_bytes: Bound on the bytes of keys and values per rank; further samples wait. None: room for
            ``max_slots`` of the longest sample.
        sample_reallocation: Samples that move between data-parallel ranks so that all finish together. True or
            ``"queued"``: those that wait for a slot; ``"all"``: running ones too. Tokens stay the same.
        peft_config: Adapters to train: a ``LoraConfig``, a mapping with ``peft_type: LORA``, or a folder of saved ones,
            for every trained role; or role -> one of these.
        allow_missing: Whether a model's folder may lack weights of its config (then random) or hold more. A new head
            needs no permission.
        liger_kernels: Whether models run Liger's kernels, on CUDA and with the package liger-kernel.
        seed: Seed of random weights, sampling, dropout and mini-batch order; None: that of ``seed_everything``, else 0.
        generation: Group of the settings of generation; its fields take precedence.
        tokenizer: Tokenizer, its name or folder; None: that of the first language model.
    """

    names_elsewhere = ALGORITHM_HINTS
    _tokenizer: PreTrainedTokenizerBase | None
    optional_roles: tuple[str, ...] = ()
    """Roles that :meth:`roles` may leave out, and their calls with them."""
    share_prompts: bool = False
    """Whether samples next to each other in a pack may hold the same prompt once; models must look back only, and
    methods find the token before a token by ``PackedBatch.predecessors``, as ``token_logprobs`` does."""
    group_size: int = 1
    """How many samples next to each other belong together, as a chosen response and the rejected one do: they are in
    one micro-batch, in this order, and in one mini-batch. Batches hold whole groups."""
    totals_of: tuple[str, ...] = ()
    """The batch's columns of one number per sample whose sums over a mini-batch a loss gets in ``totals.sums``."""
    answered_ahead: tuple[str, ...] = ()
    """Calls that no iteration runs from here on: what they would produce comes with the batch."""
    default_learning_rate: float = 1e-6
    """Of whole weights, where none is given."""
    supports_rollout_budget: bool = False
    """Whether unfinished responses can continue in the next iteration, as a ``rollout_budget`` asks."""
    dropout: bool = False
    """Whether dropout is active in training; policies are trained on the distribution that they were sampled from."""

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
        max_cache_bytes: int | None = None,
        sample_reallocation: SampleReallocation = False,
        peft_config: Any = None,
        allow_missing: bool = False,
        liger_kernels: bool = False,
        seed: int | None = None,
        generation: GenerationOptions | None = None,
        tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        check_type(TrainOptions, train_options=train_options)
        check_type(GenerationOptions, generation=generation)
        check_type(bool, allow_missing=allow_missing, liger_kernels=liger_kernels)
        if optimizer is not None and learning_rate is not None:
            raise ConfigError(
                f"learning_rate={learning_rate} is for the default AdamW, and optimizer={optimizer} brings a learning "
                f"rate of its own; give it there, as in partial(torch.optim.SGD, lr={learning_rate}), and leave "
                f"learning_rate out"
            )
        self.learning_rate = learning_rate
        self.train_options = train_options or TrainOptions()
        options = GenerationOptions(
            engine=engine,
            speculation=speculation,
            max_cache_bytes=max_cache_bytes,
            sample_reallocation=sample_reallocation,
        )
        self._set_generation(options if generation is None else generation.over(options))
        self.peft_config = peft_config
        self.allow_missing = allow_missing
        self.liger_kernels = liger_kernels
        self._seed = seed
        self.optimizer_settings = RoleOptimizer(
            optimizer=optimizer, lr_scheduler=lr_scheduler, weight_decay=weight_decay, no_decay=no_decay
        )
        self.role_optimizers = dict(optimizers or {})
        self.tokenizer = tokenizer
        self.sources: dict[str, ModelSource] = {}
        """Role -> where its weights come from. In a dict a model that was given as a module becomes no child of this
        module. Once all roles are built, only its shapes are kept."""

    def _set_generation(self, options: GenerationOptions) -> None:
        if options.rollout_budget is not None and not self.supports_rollout_budget:
            raise ConfigError(
                f"{options.rollout_budget} continues responses in the next iteration, and {type(self).__name__} has "
                f"none that could; leave rollout_budget out of generation"
            )
        self.generation_options = options
        self.engine = options.engine
        self.speculation = options.speculation
        self.max_cache_bytes = options.max_cache_bytes
        self.sample_reallocation = options.sample_reallocation

    @classmethod
    def check_settings(cls, settings: Mapping[str, object]) -> None:
        """Refuse unknown settings, and options given twice with different values."""
        super().check_settings(settings)
        refuse_contradictions(cls, settings)

    @property
    def seed(self) -> int:
        """Of random weights, sampling, dropout and mini-batch order; the same on every rank."""
        return seed_of_run(self._trainer) if self._seed is None else self._seed

    # ---- what a subclass says about itself
    def roles(self) -> tuple[Role, ...]:
        """Return the algorithm's models."""
        raise NotImplementedError(f"{type(self).__name__} must return its models from roles()")

    def calls(self) -> tuple[ModelFunctionCall, ...]:
        """Return the calls that this module's settings ask for; by default all that its class declares."""
        return declared_calls(type(self))

    def runs(self, call: str, iteration: int) -> bool:
        """Return whether a call takes part in an iteration, counted from 0; the same on every rank.

        What a call that is left out would have produced is missing: leave out those that need it, too.
        """
        return True

    def train_options_of(self, role: str) -> TrainOptions:
        """Return how a role goes through its samples."""
        return self.train_options

    def optimizer_of(self, role: str) -> RoleOptimizer:
        """Return how a trained role is optimized."""
        default = RoleOptimizer(learning_rate=self._learning_rate_of(role))
        return chosen_for(role, self.role_optimizers, self.optimizer_settings.over(default))

    def _learning_rate_of(self, role: str) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        adapted = any(known.name == role and known.has_adapters for known in self.roles())
        return self.default_learning_rate * (_ADAPTERS_LEARN_FASTER if adapted else 1.0)

    def new_optimizer(self, role: str, parameters: Parameters) -> torch.optim.Optimizer:
        """Return the optimizer of a trained role, for its parameters or groups of them."""
        return self.optimizer_of(role).make(parameters)

    def peft_of(self, role: str, *, trained: bool = True) -> AdapterSource | None:
        """Return the adapters that ``peft_config`` gives a role: of one that is not trained, only if it is named."""
        config = self.peft_config
        if isinstance(config, Mapping) and "peft_type" not in config:
            return config.get(role)
        return config if trained else None

    def make_role(self, name: str, *, trained: bool, task: Task = "causal_lm") -> Role:
        """Return a role with the weights of ``sources[name]`` and the adapters that ``peft_config`` gives it."""
        peft = self.peft_of(name, trained=trained)
        return Role(name=name, source=self.sources[name], trained=trained, task=task, peft=peft)

    def reference_of(self, actor: Role, source: ModelSource | None) -> Role:
        """Return a frozen reference: of ``source``; without one of what the actor begins as.

        That is an actor with adapters, without them: it needs no copy of its own.
        """
        peft = self.peft_of("reference", trained=False)
        if source is None and peft is None and actor.has_adapters:
            return Role(name="reference", source=actor.source, trained=False, shares=actor.name)
        return Role(name="reference", source=actor.source if source is None else source, trained=False, peft=peft)

    def with_carried(self, batch: Samples) -> Samples:
        """Return what an iteration works on: the loader's batch, and prompts of earlier ones that it goes on with.

        The same on every rank.
        """
        return batch

    def on_samples_carried(self, samples: Samples | None, *, num_learnt: int) -> None:
        """Take what generating calls left for the next iteration, the same on every rank; None: nothing.

        ``num_learnt`` samples were learnt from.
        """

    def on_iteration_end(self, samples: Samples) -> None:
        """Update what the algorithm keeps between iterations, from the same samples as :meth:`summarize` gets.

        Every rank calls it with the same samples, so what it keeps is equal everywhere; kept in buffers, it is part
        of checkpoints.
        """

    # ---- what follows from it
    @property
    def dataflow(self) -> Dataflow:
        """The calls of one iteration.

        Calls of optional roles that this module was not given are left out, and with them what only they produce.

        Raises:
            PlanError: for a call of any other role that :meth:`roles` does not return, and for calls that contradict
                each other.
        """
        present = tuple(role.name for role in self.roles())
        return _dataflow_of(self.calls(), present, self.optional_roles)

    @classmethod
    def calls_for(cls, roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
        """Return the calls of the class where there are models for these roles only; by default all it declares."""
        return declared_calls(cls)

    @classmethod
    def dataflow_of(cls, roles: Iterable[str]) -> Dataflow:
        """Return the calls of one iteration when there are models for these roles only.

        A computation that produces what one of the models does is left out: reward functions beside a reward model.
        """
        present = tuple(roles)
        calls = cls.calls_for(present)
        made = {name for call in calls if call.role in present for name in call.produces}
        fitting = tuple(call for call in calls if call.role is not None or made.isdisjoint(call.produces))
        return _dataflow_of(fitting, present, tuple(call.role for call in calls if call.role is not None))

    def models(self) -> dict[str, nn.Module]:
        """Return role name -> model, as far as they are built."""
        return {role.name: getattr(self, role.name) for role in self.roles() if hasattr(self, role.name)}

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the first language model that is loaded from a name or folder, unless one was set."""
        if self._tokenizer is None:
            # Not of a classifier beside a language model: it may read tokens of another vocabulary.
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
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | str | Path | None) -> None:
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer

    # ---- Lightning's hooks
    def setup(self, stage: str) -> None:
        """Let reward functions make sure that they can work, before any weights are loaded."""
        for functions in self._reward_functions_kept():
            functions.trainer_state = self._trainer_state
            functions.start()

    def release(self) -> None:
        """End what reward functions keep running; the strategy calls it when a run is over, however it ended."""
        for functions in self._reward_functions_kept():
            functions.close()

    def configure_model(self) -> None:
        """Build every model that is not built yet; called again before validate and test."""
        self._check_named_roles()
        self._unregister_sources()
        for role in self.roles():
            if role.shares is None and not hasattr(self, role.name):
                model = role.build(seed=self.seed, allow_missing=self.allow_missing)
                if self.liger_kernels:
                    use_liger_kernels(model, role.name, self._strategy.root_device)
                setattr(self, role.name, model)
        self.sources.update({role: without_weights(source) for role, source in self.sources.items()})

    def _unregister_sources(self) -> None:
        """Take attributes of a subclass that roles are built from out of this module's children, and of checkpoints."""
        roles = self.roles()
        for name, child in list(self._modules.items()):
            if any(child is role.source for role in roles) and all(name != role.name for role in roles):
                del self._modules[name]
                vars(self)[name] = child

    def _check_named_roles(self) -> None:
        config, roles, trained = self.peft_config, [role.name for role in self.roles()], self.dataflow.trained_roles
        adapted = config if isinstance(config, Mapping) and "peft_type" not in config else {}
        if unknown := sorted(adapted.keys() - set(roles)):
            raise ConfigError(
                f"peft_config names {', '.join(map(str, unknown))}, and the roles are {', '.join(roles)}; write "
                f"role: configuration, or a single configuration with peft_type: LORA"
            )
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

    def configure_optimizers(self) -> Any:
        """Return one optimizer per trained role, its first parameter group named after the role."""
        made = []
        for role in self.dataflow.trained_roles:
            settings = self.optimizer_of(role)
            made.append(settings.configure(self.new_optimizer(role, settings.parameters(getattr(self, role))), role))
        return made if made else None

    def on_fit_start(self) -> None:
        """Check the data's token ids, and leave out warnings that say nothing here.

        Every call sets the mode that it needs, and changes no output.
        """
        warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        warnings.filterwarnings("ignore", message=r".*FSDP2-wrapped module .* returned a view tensor")
        data = getattr(self.trainer, "datamodule", None)
        for table in data.tables.values() if isinstance(data, RowDataModule) else ():
            self._check_token_ids(table, kinds=("generate", "infer", "train"))

    def require_batch(self, batch: object) -> None:
        """Raise DataError for what is no batch of the algorithm's, and for token ids outside a model's embeddings."""
        super().require_batch(batch)
        assert isinstance(batch, Samples)
        self._check_token_ids(batch, kinds=("infer", "train"))  # the engine checks what it generates from

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
        """Return samples as rows for people and files: prompt, response, rewards, the data's columns."""
        return sample_rows(samples, self.tokenizer)

    @property
    def optimizer_bytes(self) -> int:
        """Most bytes that an optimizer keeps for each fp32 weight, found by a step on a small one; 0 where unknown."""
        written_by_hand = type(self).configure_optimizers is not MultiModelModule.configure_optimizers
        if written_by_hand or not self.dataflow.trained_roles:
            return 0
        return max(state_bytes(partial(self.new_optimizer, role)) for role in self.dataflow.trained_roles)

    def _reward_functions_kept(self) -> list[RewardFunctions]:
        return [kept for kept in vars(self).values() if isinstance(kept, RewardFunctions)]

    def _trainer_state(self) -> TrainerState:
        trainer = self.trainer
        return TrainerState(
            global_step=trainer.global_step, max_steps=int(trainer.max_steps), epoch=float(trainer.current_epoch)
        )

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse, with what to do instead: a checkpoint is a folder of shards, which only a strategy can place.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"{cls.__name__} is not built from a checkpoint; to go on training give {checkpoint_path} as "
            f"trainer.fit(..., ckpt_path=...), to use its weights write them with "
            f"'lightning-realloc export {checkpoint_path} --output DIR' and give DIR as the model"
        )


@cache  # asked for many times an iteration; by roles, because a coefficient that is changed may add or drop one
def _dataflow_of(
    calls: tuple[ModelFunctionCall, ...], roles: tuple[str, ...], optional_roles: tuple[str, ...]
) -> Dataflow:
    for call in calls:
        if call.role is not None and call.role not in (*roles, *optional_roles):
            raise PlanError(
                f"call {call.name!r} is of role {call.role!r}, which roles() does not return; it returns "
                f"{', '.join(roles) or 'none'}. Add a Role({call.role!r}), or name it in optional_roles to leave its "
                f"calls out"
            )
    kept = [call for call in calls if call.role is None or call.role in roles]
    made = {name for call in kept for name in call.produces}
    absent = {name for call in calls for name in call.produces} - made
    needs = [tuple(name for name in call.needs if name not in absent) for call in kept]
    return Dataflow(tuple(replace(call, needs=names) for call, names in zip(kept, needs, strict=True)))
