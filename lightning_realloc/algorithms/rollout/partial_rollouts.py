"""Split responses into those to train on now and those to continue in the next iteration.

Every rank has the unfinished responses with their prompts. So any rank in any layout can continue them, and one rank's
checkpoint holds all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_realloc.algorithms.base.rollout_columns import (
    FINISH_REASONS,
    Dialogue,
    model_mask,
    rollout_of,
)
from lightning_realloc.algorithms.losses.functional import token_ages
from lightning_realloc.batch.model_input import ModelInput
from lightning_realloc.batch.samples import (
    ANSWER_INPUTS,
    EXTRA_INPUT,
    OLDEST_AGES,
    PROMPT_IMAGES,
    Divided,
    Ragged,
    Samples,
    answer_column,
    answer_inputs,
    image_column,
    model_inputs,
    samples_from_state,
    samples_state,
)
from lightning_realloc.environments.columns import CONVERSATION
from lightning_realloc.errors import CheckpointError, DataError
from lightning_realloc.generation import Completion, Engine, RolloutBudget, SamplingParams

_UNFINISHED = FINISH_REASONS.index("unfinished")


@dataclass(frozen=True, slots=True, eq=False)
class PartialRollouts:
    """Responses that an iteration leaves for the next one, with their prompts."""

    prompts: Samples
    """Rows of the loader."""
    responses: Samples
    """Responses to these prompts, with the columns of a rollout, ``versions`` (ragged: iteration of the weights that
    sampled each token) and ``began_in`` (B,): iteration of the prompt. Finished ones wait for the rest of their
    group."""

    @classmethod
    def from_responses(cls, responses: Samples, worked_on: Samples) -> PartialRollouts:
        """Return responses with their prompts, from all prompts of an iteration."""
        wanted = set(responses.tensor("prompt_id").tolist())
        rows = [row for row, prompt in enumerate(worked_on.ids.tolist()) if prompt in wanted]
        return cls(worked_on.select(rows), responses)

    def prepend_to(self, batch: Samples) -> Samples:
        """Return these prompts, followed by the loader's.

        Raises:
            DataError: for a prompt of the loader whose earlier responses are not finished.
        """
        again = sorted(set(self.prompts.ids.tolist()) & set(batch.ids.tolist()))
        if again:
            raise DataError(
                f"the ids {again[:5]} of this batch's prompts are those of prompts whose responses are not finished; a "
                f"loader must continue its ids from epoch to epoch if a rollout_budget carries responses over"
            )
        return Samples.concatenate([self.prompts, batch])

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"prompts": samples_state(self.prompts), "responses": samples_state(self.responses)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PartialRollouts:
        """Restore the result of :meth:`state`, also of a version whose environments showed no images."""
        responses = samples_from_state(state["responses"])
        if "model_mask" in responses and ANSWER_INPUTS not in responses:
            responses = responses.with_columns(**{ANSWER_INPUTS: answer_column([()] * len(responses))})
        if CONVERSATION in responses and PROMPT_IMAGES not in responses:
            responses = responses.with_columns(**{PROMPT_IMAGES: image_column([None] * len(responses))})
        return cls(samples_from_state(state["prompts"]), responses)

    def check(self, num_responses: int, wanted: int, *, has_environment: bool) -> None:
        """Raise CheckpointError if a run with groups of ``wanted`` responses cannot continue these.

        Args:
            num_responses: Number of responses in each group of the run that saved them.
            has_environment: Whether the run has an environment.
        """
        said = f"the {len(self.responses)} responses that go on from the checkpoint began"
        if num_responses != wanted:
            raise CheckpointError(
                f"{said} with sampling.n={num_responses}, and this run has sampling.n={wanted}; resume with "
                f"n={num_responses}, or leave rollout_budget out to drop them"
            )
        talked = "model_mask" in self.responses
        if talked != has_environment:
            raise CheckpointError(
                f"{said} {'with' if talked else 'without'} an environment, and this run has "
                f"{'one' if has_environment else 'none'}; resume with the environment of the run that saved it, or "
                f"leave rollout_budget out to drop them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedRollout:
    """A rank's generation in an iteration with a budget."""

    budget: RolloutBudget
    iteration: int
    """Iteration, counted from 0, which is also the version of the weights."""
    num_minibatches: int
    """Smallest number of samples that a rank finishes, if it has so many."""
    whole_groups: bool
    """Whether a finished response waits for the others to its prompt."""
    dialogue: Dialogue | None = None
    add_parts: Callable[[Samples], Samples] | None = None
    """Adds the columns of parts to finished responses."""

    def run(self, engine: Engine, prompts: Samples, sampling: SamplingParams, earlier: Samples | None) -> Divided:
        """Generate responses to prompts, and continue those from ``earlier`` iterations."""
        done, unfinished_parts = _begun(earlier, prompts)
        seen = {prompt for part in (*done, *unfinished_parts) for prompt in part.tensor("prompt_id").tolist()}
        fresh = prompts.select([row for row, prompt in enumerate(prompts.ids.tolist()) if prompt not in seen])
        new = fresh.with_columns(prompt_id=fresh.ids, began_in=torch.full_like(fresh.ids, self.iteration))
        new = new.repeat(sampling.n)
        rows = Samples.concatenate([_only_known(part) for part in (new, *unfinished_parts)])
        progress = Progress(
            self._group_of(rows), least=self.num_minibatches, late=self._late(rows), waiting=self._waiting(done)
        )
        inputs: Sequence[ModelInput] = model_inputs(fresh)
        params = sampling
        waiting = _with_rows(unfinished_parts, prompts)
        resumed = [one for part in unfinished_parts for one in _completions(replace(part, data=waiting.data))]
        if self.dialogue is not None:
            self.dialogue.resume(waiting, resumed)
            inputs, params = self.dialogue.begin(fresh, new, sampling)
        completions = engine.generate(
            inputs, params, sample_ids=new.ids.tolist(), resume=resumed,
            token_budget=self.budget.tokens, seconds_budget=self.budget.seconds,
            on_finished=progress.record, may_stop=progress.may_stop,
            **({} if self.dialogue is None else self.dialogue.settings),
        )  # fmt: skip
        versions = Ragged.from_list([completion.versions for completion in completions], dtype=torch.int64)
        made = engine.with_experts(rollout_of(rows, completions, self.dialogue), completions)
        made = made.with_columns(versions=versions, began_in=rows.tensor("began_in"))
        return self._divide(Samples.concatenate([made, *done]))

    def _divide(self, made: Samples) -> Divided:
        """Split samples into finished groups and groups with an unfinished sample."""
        groups = self._group_of(made)
        unfinished = {
            groups[sample]
            for sample, reason in zip(made.ids.tolist(), made.tensor("finish_reason").tolist(), strict=True)
            if reason == _UNFINISHED
        }
        dropped = set() if self.budget.late == "finish" else {groups[sample] for sample in self._expiring(made)}
        by_row = [groups[sample] for sample in made.ids.tolist()]
        finished = made.select([row for row, group in enumerate(by_row) if group not in unfinished])
        carried = made.select([row for row, group in enumerate(by_row) if group in unfinished - dropped])
        finished = self._with_staleness(finished).without_columns("began_in")
        return Divided(finished if self.add_parts is None else self.add_parts(finished), carried)

    def _with_staleness(self, samples: Samples) -> Samples:
        """Add the sum and the largest of the ages of each sample's tokens of the model, in iterations."""
        sums, oldest = token_ages(samples.ragged("versions"), model_mask(samples), self.iteration)
        return samples.with_columns(stale_tokens=sums, **{OLDEST_AGES: oldest})

    def _group_of(self, samples: Samples) -> dict[int, int]:
        """Return sample id -> group that is trained on together: its prompt, or the sample itself."""
        ids = samples.ids.tolist()
        return dict(zip(ids, samples.tensor("prompt_id").tolist() if self.whole_groups else ids, strict=True))

    def _expiring(self, samples: Samples) -> list[int]:
        """Return the ids of samples that may not be carried over again."""
        oldest = self.iteration - self.budget.max_staleness
        pairs = zip(samples.ids.tolist(), samples.tensor("began_in").tolist(), strict=True)
        return [sample for sample, began in pairs if began <= oldest]

    def _late(self, rows: Samples) -> list[int]:
        """Return the ids of samples that must be finished in this iteration."""
        return self._expiring(rows) if self.budget.late == "finish" else []

    def _waiting(self, done: Sequence[Samples]) -> Counter[int]:
        """Return the number of finished samples that wait for others, by group."""
        return Counter(group for part in done for group in self._group_of(part).values())


class Progress:
    """Count finished samples during generation, and decide when it may stop.

    Args:
        group_of: Open sample -> group that is trained on together.
        least: Sufficient number of samples in finished groups.
        late: Samples that must be finished.
        waiting: Number of finished samples by group with open ones.
    """

    def __init__(
        self, group_of: Mapping[int, int], *, least: int, late: Collection[int], waiting: Mapping[int, int]
    ) -> None:
        self._group_of = group_of
        self._num_open = Counter(group_of.values())
        self._sizes = self._num_open + Counter(waiting)
        self._least = least
        self._late = set(late)
        self._num_finished = 0

    def record(self, completion: Completion) -> None:
        """Record a sample; unfinished ones change nothing."""
        if completion.finish_reason == "unfinished":
            return
        group = self._group_of[completion.sample_id]
        self._late.discard(completion.sample_id)
        self._num_open[group] -= 1
        if not self._num_open[group]:
            self._num_finished += self._sizes[group]

    def may_stop(self) -> bool:
        """Return whether the other samples may continue in the next iteration."""
        return self._num_finished >= self._least and not self._late


def _begun(earlier: Samples | None, prompts: Samples) -> tuple[list[Samples], list[Samples]]:
    """Return the finished and the unfinished responses to these prompts, each in a list of at most one batch."""
    if earlier is None:
        return [], []
    wanted = set(prompts.ids.tolist())
    pairs = zip(earlier.tensor("prompt_id").tolist(), earlier.tensor("finish_reason").tolist(), strict=True)
    rows: tuple[list[int], list[int]] = ([], [])
    for row, (prompt, reason) in enumerate(pairs):
        if prompt in wanted:
            rows[reason == _UNFINISHED].append(row)
    done, unfinished_parts = ([earlier.select(part)] if part else [] for part in rows)
    return done, unfinished_parts


def _with_rows(unfinished: Sequence[Samples], prompts: Samples) -> Samples:
    """Return unfinished responses with the data's columns of their prompts."""
    row_of = {prompt: row for row, prompt in enumerate(prompts.ids.tolist())}
    rows = [row_of[prompt] for part in unfinished for prompt in part.tensor("prompt_id").tolist()]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *[part.ids for part in unfinished]])
    data = {name: tuple(column[row] for row in rows) for name, column in prompts.data.items()}
    return Samples(ids, {"prompt_ids": prompts.ragged("prompt_ids").select(rows)}, data)


def _only_known(samples: Samples) -> Samples:
    """Return the columns of samples that exist before generation."""
    extras = [name for name in samples.columns if name.startswith(EXTRA_INPUT)]
    return Samples(samples.ids, {name: samples[name] for name in ("prompt_id", "prompt_ids", "began_in", *extras)})


def _completions(samples: Samples) -> list[Completion]:
    """Return unfinished responses in the form that an engine resumes."""
    mask = model_mask(samples)
    responses = samples.ragged("response_ids").to_lists()
    masks = [[True] * len(response) for response in responses] if mask is None else mask.to_lists()
    columns = (
        samples.ids.tolist(), model_inputs(samples), responses,
        samples.ragged("behaviour_logprobs").to_lists(), masks, samples.ragged("versions").to_lists(),
        answer_inputs(samples),
    )  # fmt: skip
    return [
        Completion(
            sample_id=sample_id, prompt_index=0, token_ids=tuple(tokens), logprobs=tuple(map(float, logprobs)),
            finish_reason="unfinished", model_mask=tuple(map(bool, chosen)), versions=tuple(versions),
            input=prompt, answers=answers,
        )
        for sample_id, prompt, tokens, logprobs, chosen, versions, answers in zip(*columns, strict=True)
    ]  # fmt: skip
