"""Distillation of a draft model from the target's responses, so that drafts follow a policy that trains.

It decides how many drafted tokens are accepted, never which tokens a response gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_realloc.generation.core.model_config import text_config_of
from lightning_realloc.limits import DISTILLATION_TOKENS

Example = tuple[tuple[int, ...], tuple[int, ...]]
"""A prompt and one response to it."""

_MOST_GRADIENT = 1.0


class Distillation:
    """Trains a draft model on responses by cross-entropy.

    Every rank learns from its own responses. Ranks that share a tensor-parallel target must draft alike. They see the
    same responses in the same order, and ``spread`` copies one rank's weights to all of them, since rounding differs.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        most_tokens: int = 65_536,
        spread: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Train with AdamW on the responses of a generation that finished last, ``most_tokens`` tokens at most.

        Training leaves out tokens beyond the model's context, and skips steps without a finite gradient.
        """
        self._model = model.requires_grad_(True)
        self._context: int | None = getattr(text_config_of(model), "max_position_embeddings", None)
        self._spread = spread
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
        self._most_tokens = most_tokens

    def learn(self, examples: Sequence[Example]) -> float | None:
        """Train for one pass over the responses; return the mean loss per token, None without responses."""
        total, count = 0.0, 0
        # Callers may generate in inference mode, whose tensors cannot be learnt from.
        with torch.inference_mode(False), torch.enable_grad():
            for tokens, is_response in self._batches(examples):
                logits = self._model(input_ids=tokens, use_cache=False).logits[:, :-1]
                targets, learnt = tokens[:, 1:], is_response[:, 1:]
                loss = cross_entropy(logits[learnt].float(), targets[learnt])
                loss.backward()
                norm = nn.utils.clip_grad_norm_(self._model.parameters(), _MOST_GRADIENT)
                if torch.isfinite(norm):
                    self._optimizer.step()
                    total += float(loss.detach()) * int(learnt.sum())
                    count += int(learnt.sum())
                self._optimizer.zero_grad(set_to_none=True)
        if self._spread is not None:
            self._spread([parameter.detach() for parameter in self._model.parameters()])
        return total / count if count else None

    def _batches(self, examples: Sequence[Example]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens (B, S) and the mask of response tokens, with sequences of similar length in each batch.

        Rows are padded at their ends, which causal attention ignores.
        """
        recent: list[Example] = []
        num_tokens = 0
        for prompt, response in reversed(examples):
            example = prompt, response if self._context is None else response[: max(self._context - len(prompt), 0)]
            if not example[1]:
                continue
            num_tokens += len(example[1])
            if num_tokens > self._most_tokens and recent:
                break
            recent.append(example)
        recent.sort(key=lambda example: len(example[0]) + len(example[1]))
        batch: list[Example] = []
        for example in recent:
            if batch and (len(batch) + 1) * (len(example[0]) + len(example[1])) > DISTILLATION_TOKENS:
                yield self._padded(batch)
                batch = []
            batch.append(example)
        if batch:
            yield self._padded(batch)

    def _padded(self, batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
        width = max(len(prompt) + len(response) for prompt, response in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        is_response = torch.zeros(len(batch), width, dtype=torch.bool)
        for row, (prompt, response) in enumerate(batch):
            end = len(prompt) + len(response)
            tokens[row, :end] = torch.tensor((*prompt, *response))
            is_response[row, len(prompt) : end] = True
        device = next(self._model.parameters()).device
        return tokens.to(device), is_response.to(device)
