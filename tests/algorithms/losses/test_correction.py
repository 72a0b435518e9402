"""Corrections for responses of another engine or of older weights: weights by hand, and verl's on a stored table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from lightning_realloc.algorithms.losses.correction import (
    CORRECTIONS,
    Correction,
    CorrectionName,
    corrected_loss,
    mismatch_metrics,
    resolve_ratios,
)
from lightning_realloc.algorithms.losses.policy_losses import Clip, Vespo
from lightning_realloc.batch.packing import PackedBatch, pack
from lightning_realloc.batch.ragged import Ragged
from lightning_realloc.batch.samples import Samples
from lightning_realloc.batch.training import Average, Loss
from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies.calls.metrics import MetricSums

RATIOS = [[1.5, 2.0], [0.5, 0.4, 4.0], [1.0]]
"""Ratios of tokens; their products are 3, 0.8 and 1, their geometric means 1.73, 0.93 and 1."""
VERLS: dict[str, Correction] = {
    **{name: correction for name, correction in CORRECTIONS.items() if correction is not None},
    "icepop": Correction(cap=5.0, reject="token", low=0.5, high=5.0),
    "geo_rs_token_tis": Correction(reject="geometric", low=0.9, high=1.1),
    # verl bounds the inverse of the ratio here, by 0.6 and 1.5.
    "token_k1": Correction(weigh="none", reject="token", low=1 / 1.5, high=1 / 0.6),
}
"""Our corrections for the cases of the stored table."""


def packed(behaviour: list[list[float]], model_mask: list[list[bool]] | None = None) -> PackedBatch:
    """Return responses to prompts of two tokens, with the log-probabilities of their tokens when they were drawn."""
    columns: dict[str, Any] = {
        "prompt_ids": Ragged.from_list([[5, 6]] * len(behaviour)),
        "response_ids": Ragged.from_list([[7] * len(row) for row in behaviour]),
        "behaviour_logprobs": Ragged.from_list(behaviour, dtype=torch.float32),
    }
    if model_mask is not None:
        columns["model_mask"] = Ragged.from_list(model_mask, dtype=torch.bool)
    return pack(Samples(torch.arange(len(behaviour)), columns), columns=["behaviour_logprobs"])


def flat(rows: list[list[float]]) -> Tensor:
    """Return values of the responses' tokens as a flat pack, with arbitrary ones at the prompts."""
    return torch.tensor([value for row in rows for value in (9.0, -9.0, *row)])


def weights(correction: Correction, model_mask: list[list[bool]] | None = None) -> list[float]:
    """Return the weights of the tokens with RATIOS, rounded."""
    batch = packed([[0.0] * len(row) for row in RATIOS], model_mask)
    proximal = flat([[math.log(ratio) for ratio in row] for row in RATIOS])
    found = correction.weights(proximal, batch["behaviour_logprobs"], batch)
    return [round(value, 5) for value in found.values[batch.response_mask].tolist()]


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (Correction(cap=1.9, floor=0.45), [1.5, 1.9, 0.5, 0.45, 1.9, 1.0]),
        (Correction(reject="token", low=0.45, high=1.9), [1.5, 0.0, 0.5, 0.0, 0.0, 1.0]),
        (Correction(weigh="sequence", cap=1.9), [1.9, 1.9, 0.8, 0.8, 0.8, 1.0]),
        (Correction(weigh="sequence", reject="sequence", low=0.0, high=1.9), [0.0, 0.0, 0.8, 0.8, 0.8, 1.0]),
        (Correction(weigh="none", reject="geometric", low=0.9, high=1.1), [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        (Correction(weigh="none", least_token=0.45), [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_weights_are_bounded_ratios_of_what_is_not_excluded(correction: Correction, expected: list[float]) -> None:
    assert weights(correction) == expected


def test_tokens_of_an_environment_exclude_no_response() -> None:
    correction = Correction(weigh="sequence", cap=9.0, least_token=0.45)
    assert weights(correction, [[True, False], [True, False, True], [True]]) == [1.5, 2.0, 2.0, 1.0]


@pytest.mark.parametrize("name", VERLS)
def test_weights_equal_verls(name: str) -> None:
    table = json.loads(Path("tests/parity/verl_tables.json").read_text())["corrections"]
    batch = packed(table["behaviour"])
    found = VERLS[name].weights(flat(table["proximal"]), batch["behaviour_logprobs"], batch).values
    expected = [weight for row in table["weights"][name] for weight in row]
    assert found[batch.response_mask].tolist() == pytest.approx(expected, abs=1e-5)


def test_every_name_is_compared_with_verl() -> None:
    assert set(CORRECTIONS) == set(get_args(CorrectionName)) == {"none", *VERLS} - {
        "icepop", "geo_rs_token_tis", "token_k1"
    }  # fmt: skip


def test_excluded_tokens_have_no_loss_even_if_theirs_is_not_finite() -> None:
    batch = packed([[0.0, 0.0], [0.0]])
    values, _ = corrected_loss(
        flat([[math.inf, 2.0], [3.0]]), flat([[9.0, 0.5], [-0.5]]), batch, Correction(reject="token", low=0.0, high=2.0)
    )
    assert values[batch.response_mask].tolist() == pytest.approx([0.0, 2 * math.exp(0.5), 3 * math.exp(-0.5)])


def test_metrics_say_whether_a_correction_acts() -> None:
    # Weights 1.5, 1.9 (truncated), 0.5, 0 (excluded), 1.9 (truncated), 1, merged over two micro-batches.
    correction, sums = Correction(cap=1.9, reject="token", low=0.45, high=4.0), MetricSums()
    for rows in (RATIOS[:1], RATIOS[1:]):
        batch = packed([[0.0] * len(row) for row in rows])
        proximal = flat([[math.log(ratio) for ratio in row] for row in rows])
        metrics = correction.weights(proximal, batch["behaviour_logprobs"], batch).metrics(batch.response_mask)
        sums.add(Loss(torch.tensor(0.0), metrics), counts=True)
    found = {name: float(value) for name, value in sums.reduce(None, torch.device("cpu")).items()}
    kept = torch.tensor([1.5, 1.9, 0.5, 0.0, 1.9, 1.0])
    assert found == pytest.approx({
        "loss": 0.0, "correction_weight": float(kept.mean()), "correction_excluded": 1 / 6,
        "correction_truncated": 2 / 6, "effective_sample_size": float(kept.sum() ** 2 / (6 * kept.square().sum())),
    })  # fmt: skip


def test_the_mismatch_between_engine_and_trained_model_is_measured() -> None:
    batch = packed([[math.log(0.5)] * 2, [math.log(0.5)] * 3, [math.log(0.5)]])
    proximal = flat([[math.log(0.5), math.log(0.25)], [math.log(0.5)] * 3, [math.log(0.5)]])
    measured = mismatch_metrics(proximal, batch["behaviour_logprobs"], batch)
    found = {name: value_of(average) for name, average in measured.items()}
    # One of six tokens differs, by log(1/2); the ratio r of trained model and engine is 1/2: r - 1 - log r.
    assert found["engine_difference"] == pytest.approx(math.log(2) / 6, abs=1e-6)
    assert found["engine_kl"] == pytest.approx((0.5 - 1 + math.log(2)) / 6, abs=1e-6)


def value_of(average: Average) -> float:
    """Return the mean of one micro-batch."""
    return float(average.total / average.weight)


def test_invalid_corrections_are_refused() -> None:
    for make, message in (
        (lambda: Correction(floor=2.0), r"floor=2.0 must lie below cap=2.0"),
        (lambda: Correction(low=1.5, high=1.2), r"low=1.5 must lie below high=1.2"),
        (lambda: Correction(cap=None), "cap=None is a NoneType; write a number"),  # type: ignore[arg-type]
        (lambda: Correction(weigh="geometric"), "weigh='geometric' must be one of token, sequence, none"),  # type: ignore[arg-type]
        (lambda: Correction(reject="all"), "reject='all' must be one of token, sequence, geometric, none"),  # type: ignore[arg-type]
        (lambda: Correction(least_token=1.0), "least_token=1.0 would exclude every response"),
        (lambda: Correction(max_age=-1), "max_age=-1 must be a whole number of iterations"),
        (
            lambda: Correction(high=3.0),
            "high=3.0 of Correction has no effect with reject='none'; write reject='to",
        ),
        (
            lambda: Correction(weigh="none", reject="token", cap=3.0),
            "cap=3.0 of Correction has no effect with weigh=",
        ),
        (lambda: Correction(weigh="none"), "corrects nothing; write a weigh, a reject"),
        (lambda: Correction(reject="geometric", low=1.1), "low=1.1 and high=2.0 exclude the ratio 1"),
        (lambda: Correction(reject="token", high=0.9), "low=0.5 and high=0.9 exclude the ratio 1"),
        (lambda: resolved(Correction), r"correction=Correction is a class; make an object of it, as in Correction\(\)"),
        (lambda: resolved("tis"), "correction='tis' must be one of token-truncate, sequence-mask, geometric, reject"),
        (lambda: resolved(2.0), r"correction=2.0 is a float; write one of .* or a value such as Correction\(cap=3.0\)"),
        (lambda: resolved(Correction(), ratio_to="behaviour"), "use ratio_to='proximal'"),
        (lambda: resolved("reject", loss=Vespo()), "Vespo's weights take them"),
        (lambda: resolved(None, ratio_to="old"), "ratio_to='old' must be one of behaviour, proximal"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def resolved(correction: Any, *, ratio_to: Any = None, loss: Any = None) -> Any:
    """Return both settings with their defaults, for the engine whose log-probabilities are training's."""
    return resolve_ratios(ratio_to, correction, loss or Clip(), is_other_engine=False)
