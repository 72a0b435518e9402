"""Results of evaluations, question by question, as lines of JSON, so that runs can be compared later. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_realloc.scores.question_scores import QuestionScores

SCORES_FILE = "scores.jsonl"
"""Name of the file in the folder of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """Result of a validation or test on one loader, or on an evaluation set."""

    name: str
    """Beginning of the names of its metrics: ``val``, ``test``, with several loaders ``val/dataloader_idx_1``, and
    ``eval/gsm`` for an evaluation set."""
    step: int
    """Iterations done before."""
    unix_s: float
    """Time of day, in seconds since 1970."""
    scores: QuestionScores

    def to_json(self) -> dict[str, Any]:
        """Return its line."""
        return {"name": self.name, "step": self.step, "unix_s": self.unix_s, **self.scores.to_json()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> EvaluationRecord:
        """Return the evaluation of a line. Raises KeyError, TypeError or ValueError for any other content."""
        return cls(
            name=str(content["name"]),
            step=int(content["step"]),
            unix_s=float(content["unix_s"]),
            scores=QuestionScores.from_json(content),
        )
