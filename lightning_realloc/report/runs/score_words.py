"""Scores of held-out questions in words and tables: with intervals, and compared between runs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_realloc.recording.evaluations import EvaluationRecord
from lightning_realloc.report.runs.charts import TEXT, Json, column, table
from lightning_realloc.report.runs.run_folder import RunFolder
from lightning_realloc.scores.bootstrap import NUM_RESAMPLES, Comparison, ScoreInterval, compare, intervals
from lightning_realloc.scores.question_scores import ACCURACY

MIN_QUESTIONS = 50
"""Questions below which intervals are too narrow: of 20, they miss the truth in up to one of ten cases instead of one
of twenty."""
_LOADER = "/dataloader_idx_"


def scores_table(run: RunFolder) -> list[Json]:
    """Return the table of a run's latest scores with their intervals, if there are any."""
    rows = []
    for evaluation in run.evaluations.values():
        for name, score in intervals(evaluation.scores).items():
            number = len(evaluation.scores.questions)
            rows.append([full_name(evaluation, name), _interval_cell(score), number, evaluation.step])
    if not rows:
        return []
    columns = [column("score", TEXT), column("value (95 % interval)"), column("questions"), column("iteration")]
    few = _few_questions(run.evaluations.values())
    note = f"Percentile bootstrap over questions, {NUM_RESAMPLES:,} resamples.{few}"
    return [table("scores", "Scores of held-out questions", columns, rows, note=note)]


@dataclass(frozen=True, slots=True)
class ComparedScore:
    """A score of two runs' latest evaluations of the same name."""

    found: Comparison
    evaluations: tuple[EvaluationRecord, EvaluationRecord]
    runs: tuple[str, str]
    """Names of the runs: the second is compared with the first."""

    @property
    def result(self) -> str:
        """What the interval of the difference says of the second run."""
        if not self.found.is_clear:
            return "cannot be distinguished"
        return "better" if self.found.difference.low > 0 else "worse"

    def sentence(self) -> str:
        """Return both values, the difference and the test in words."""
        first, second = (
            f"{run} ({shown_interval(one)})"
            for run, one in zip(self.runs, (self.found.first, self.found.second), strict=True)
        )
        name = full_name(self.evaluations[0], self.found.name)
        said = f"is {self.result} than {first}" if self.found.is_clear else f"and {first} {self.result}"
        difference = shown_interval(self.found.difference, sign="+")
        test = _test(self.found, self.evaluations)
        return f"{name}: {second} {said}; difference {difference}, {test}.{_few_questions(self.evaluations)}"

    def row(self) -> list[object]:
        """Return the cells of :func:`compared_table`."""
        values = (_interval_cell(one) for one in (self.found.second, self.found.first))
        number = self.found.num_paired
        test = "unpaired" if number is None else f"paired, {number} questions"
        name = full_name(self.evaluations[0], self.found.name)
        return [name, self.runs[1], *values, _interval_cell(self.found.difference, sign="+"), self.result, test]


def compare_runs(first: RunFolder, second: RunFolder) -> list[ComparedScore]:
    """Return the scores that both runs have, compared."""
    pairs = ((one, second.evaluations[name]) for name, one in first.evaluations.items() if name in second.evaluations)
    names = first.name, second.name
    return [ComparedScore(found, pair, names) for pair in pairs for found in compare(*(one.scores for one in pair))]


def accuracy_sentences(compared: Iterable[ComparedScore]) -> list[str]:
    """Return a sentence on each accuracy."""
    return [one.sentence() for one in compared if one.found.name == ACCURACY]


def compared_table(compared: Sequence[ComparedScore]) -> list[Json]:
    """Return a table of scores, if there are any."""
    if not compared:
        return []
    headers = ("score", "run", "value", "first run's value", "difference", "result", "test")
    columns = [column(header, TEXT if header in ("score", "run", "result", "test") else "number") for header in headers]
    note = (
        "Latest evaluations, with 95 % intervals. They compare these models on questions of this kind; other seeds of "
        "training would differ by more."
    )
    return [table("compared-scores", "Scores", columns, [one.row() for one in compared], note=note)]


def _test(found: Comparison, pair: Sequence[EvaluationRecord]) -> str:
    """Return the test in words, with the questions of both runs where they differ."""
    sets = [{*one.scores.questions} for one in pair]
    iterations = " and ".join(str(step) for step in dict.fromkeys(one.step for one in reversed(pair)))
    ends = f", after {iterations} iterations"
    if sets[0] == sets[1]:
        return f"paired bootstrap over {len(sets[0])} questions{ends}"
    shared = f"{len(sets[0] & sets[1])} of {len(sets[1])} and {len(sets[0])} questions are the same"
    if found.num_paired is None:
        return f"unpaired bootstrap, since the questions differ: {shared}{ends}"
    return f"both scores and the paired bootstrap are over the common questions, since others differ: {shared}{ends}"


def _few_questions(evaluations: Iterable[EvaluationRecord]) -> str:
    """Return a further sentence for evaluations with few questions."""
    has_few = any(len(one.scores.questions) < MIN_QUESTIONS for one in evaluations)
    return f" With fewer than {MIN_QUESTIONS} questions, intervals are too narrow." if has_few else ""


def full_name(evaluation: EvaluationRecord, score: str) -> str:
    """Return the name of a score's metric."""
    stage, loader, index = evaluation.name.partition(_LOADER)
    return f"{stage}/{score}{loader}{index}"


def shown_interval(score: ScoreInterval, *, sign: str = "") -> str:
    """Return a score with its interval, ``0.62 (0.55 to 0.69)``; with the sign "+", that of positive numbers as well.

    >>> shown_interval(ScoreInterval(0.62, 0.551, 0.694)), shown_interval(ScoreInterval(0.1, -0.02, 0.22), sign="+")
    ('0.62 (0.551 to 0.694)', '+0.1 (-0.02 to +0.22)')
    """
    value, low, high = (f"{one:{sign}.3g}" for one in score)
    return f"{value} ({low} to {high})"


def _interval_cell(score: ScoreInterval, *, sign: str = "") -> Json:
    return {"value": score.value, "text": shown_interval(score, sign=sign)}
