from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_realloc.recording.evaluations import SCORES_FILE
from lightning_realloc.recording.events import DATA_SHEETS, PlanInstalled, Validated
from lightning_realloc.recording.iteration_record import IterationRecord
from lightning_realloc.recording.pieces import ENVIRONMENTS, WAITING, TimePiece
from lightning_realloc.recording.rank_recorder import JsonLines, rank_file
from lightning_realloc.recording.reader import RunRecord, Session
from lightning_realloc.report.runs.charts import Json, quantity
from lightning_realloc.report.runs.page import page_data
from lightning_realloc.report.runs.rank_time import RankTimeBuilder
from lightning_realloc.report.runs.sections.time_use import time_section
from tests.recording.records import PREDICTION, started, write_events, write_session
from tests.report.runs.folders import (
    PLAN,
    content_of,
    log_metrics,
    log_scores,
    run_with,
    section_of,
    table_of,
    write_run,
    write_table,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path)


def test_the_report_of_a_run_has_no_problems_and_is_json(folder: Path) -> None:
    data = content_of(folder)

    assert data["problems"] == []
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert ["iterations", "8 of 10, ended"] in data["facts"]


def test_the_costliest_call_is_named_with_its_share(folder: Path) -> None:
    # a second an iteration: actor.train 0.4, actor.generate 0.3, a move, waiting and the host 0.1 each
    (costliest, advice) = section_of(content_of(folder), "time")["sentences"]

    assert costliest.startswith("actor.train costs most: 400 ms of 1 s an iteration (40 %")
    assert costliest.endswith("without waiting).")  # generation takes a quarter less: no call comes close
    assert advice.startswith("Moves") or "train" in advice


def test_validations_are_a_sentence_and_in_no_shares(folder: Path) -> None:
    before = table_of(content_of(folder), "time", "purposes")["rows"]
    write_events(
        folder / "log" / "version_0" / "record", [Validated(step=4, seconds=2.0), Validated(step=8, seconds=2.0)]
    )
    data = content_of(folder)

    # 8 iterations of a second
    expected = "2 validations took 4 s between iterations, 33.3 % of the time; no iteration includes it."
    assert section_of(data, "time")["sentences"][-1] == expected
    assert table_of(data, "time", "purposes")["rows"] == before


def test_shares_of_purposes_add_up_to_the_whole_time(folder: Path) -> None:
    rows = table_of(content_of(folder), "time", "purposes")["rows"]

    assert sum(row[3]["value"] for row in rows) == pytest.approx(1.0)
    assert {row[0] for row in rows} == {
        "actor.generate", "actor.train", "-> actor.generate", "waiting", "between calls",
    }  # fmt: skip


def test_predicted_and_measured_seconds_are_compared_by_call(folder: Path) -> None:
    rows = {row[0]: row for row in table_of(content_of(folder), "time", "predicted-seconds")["rows"]}

    assert rows["actor.train"][1]["value"] == pytest.approx(0.6)  # from 0.2 to 0.8 s
    assert rows["actor.train"][2]["value"] == pytest.approx(0.4)
    assert rows["actor.train"][3]["value"] == pytest.approx(0.4 / 0.6)
    assert rows["an iteration"][1]["value"] == pytest.approx(0.8)


def test_the_predicted_iteration_begins_with_the_first_work_of_the_measured_one(folder: Path) -> None:
    charts = section_of(content_of(folder), "time")["charts"]
    (lanes,) = (chart for chart in charts if chart["kind"] == "lanes")
    frame = lanes["frames"][-1]

    assert frame["step"] == 8
    assert [0, "-> actor.generate", "move", 0.1, 0.1] in frame["bars"]
    assert [1, "actor.train", "call", pytest.approx(0.3), pytest.approx(0.6)] in frame["predicted"]
    assert lanes["frames"][0]["predicted"], "the plan is the same before its prediction"


def test_samples_that_wait_for_environments_are_below_their_rank(folder: Path) -> None:
    charts = section_of(content_of(folder), "time")["charts"]
    frame = next(chart for chart in charts if chart["kind"] == "lanes")["frames"][-1]

    assert frame["waiting"] == [[rank, pytest.approx(0.25), 0.05, [2.0, 2.0, 1.0, 0.0]] for rank in (0, 1)]


def test_waiting_for_environments_has_advice_of_its_own(tmp_path: Path) -> None:
    lines = JsonLines(write_run(tmp_path) / "log" / "version_0" / "record" / rank_file(0))
    lines.write({"rank": {"step": 8, "unix_s": 1000.0}})
    pieces = (TimePiece("actor.generate", "call", 8.0, 0.5), TimePiece(ENVIRONMENTS, "environment", 8.5, 1.5))
    for step in range(1, 9):
        lines.write(IterationRecord.from_pieces(step, pieces, is_detailed=True).to_json())
    lines.close()
    section = section_of(content_of(tmp_path), "time")

    assert any("50 % of the time, because they wait for environments" in one for one in section["sentences"])
    rows = {row[0]: row for row in table_of(content_of(tmp_path), "time", "purposes")["rows"]}
    assert rows[ENVIRONMENTS][1] == "environment" and rows[ENVIRONMENTS][2]["value"] == pytest.approx(1.5)


def test_the_idle_share_is_that_of_waiting(folder: Path) -> None:
    charts = {chart["id"]: chart for chart in section_of(content_of(folder), "time")["charts"]}

    assert charts["idle"]["series"][0]["y"] == pytest.approx([0.1] * 8, rel=1e-3)
    stacked = charts["seconds"]["series"]
    assert [sum(one["y"][at] for one in stacked) for at in range(8)] == pytest.approx([1.0] * 8, rel=1e-3)


def test_moves_have_their_number_bytes_and_rate(folder: Path) -> None:
    ((call, number, seconds, size, rate, ratio),) = table_of(content_of(folder), "moves", "moves")["rows"]

    assert (call, number) == ("actor.generate", 8)
    assert seconds["value"] == pytest.approx(0.1)
    assert size["value"] == 2000
    assert rate["value"] == pytest.approx(2000 / 0.1)
    assert ratio["value"] == 2.0


def test_peaks_leave_out_the_memory_before_the_models(folder: Path) -> None:
    rows = table_of(content_of(folder), "memory", "peaks")["rows"]
    train = {row[1]: row for row in rows if row[0] == "actor.train"}

    assert train[0][2]["value"] == 400 - 50
    assert train[0][4]["value"] == pytest.approx(350 / 100)
    assert train[1][3]["value"] == 200
    assert "35 %" in section_of(content_of(folder), "memory")["sentences"][0]  # of 1000 bytes


def test_a_chart_shows_the_memory_of_a_device_if_peaks_come_near_it(folder: Path) -> None:
    (chart,) = section_of(content_of(folder), "memory")["charts"]
    assert [limit["name"] for limit in chart["limits"]] == ["memory of a device"]  # 350 of 1000 bytes

    far = replace(PREDICTION, memory_budget=1_000_000)
    write_session(folder / "far" / "record", started(unix_s=9000.0), [PlanInstalled(step=0, plan=PLAN), far], steps=8)
    (chart,) = section_of(content_of(folder / "far"), "memory")["charts"]
    assert chart["limits"] == []


def test_plans_are_counted_once_and_their_changes_named(tmp_path: Path) -> None:
    plans = [PLAN, {"calls": {"actor.train": "dp2"}}, PLAN]
    events = [PlanInstalled(step=2 * at, plan=plan) for at, plan in enumerate(plans)]
    write_session(tmp_path / "record", started(), events, steps=6)

    sentences = section_of(content_of(tmp_path), "plans")["sentences"]

    assert sentences[0] == "The run used 2 plans, and changed its plan 2 times."


def test_advice_on_waiting_depends_on_whether_a_tuner_looked_for_layouts() -> None:
    pieces = [TimePiece("actor.train", "call", 0.0, 0.5), TimePiece(WAITING, "wait", 0.5, 0.5)]
    made = tuple(IterationRecord.from_pieces(step, tuple(pieces), is_detailed=False) for step in range(1, 9))
    record = RunRecord(Path("record"), (Session(started=started(), ranks={0: made, 1: made}),))
    untuned = replace(run_with(reward=[0.1] * 8), record=record, time=RankTimeBuilder().update(record))
    tuned = replace(untuned, metrics=run_with(tuner__trials=[0.0, 1.0]).metrics)

    assert "let AutoTuner or lightning-realloc plan choose layouts" in time_section(untuned)["sentences"][1]
    assert "no layouts that AutoTuner tried were faster" in time_section(tuned)["sentences"][1]


def test_advice_holds_on_the_devices_and_for_the_models_of_the_run() -> None:
    def advice(call: str, device: str, weights: int, *, num_ranks: int = 2) -> str:
        made = tuple(
            IterationRecord.from_pieces(step, (TimePiece(call, "call", 0.0, 1.0),), is_detailed=False)
            for step in range(1, 9)
        )
        begun = replace(started(ranks=num_ranks), devices=(device,) * num_ranks, roles={"actor": weights})
        record = RunRecord(Path("record"), (Session(started=begun, ranks=dict.fromkeys(range(num_ranks), made)),))
        run = replace(run_with(reward=[0.1] * 8), record=record, time=RankTimeBuilder().update(record))
        sentence: str = time_section(run)["sentences"][1]
        return sentence.partition(": try ")[2]

    assert advice("actor.train", "cpu", 100_000) == "AutoTuner for other layouts of actor.train."
    assert advice("actor.train", "cpu", 100_000, num_ranks=1) == ""
    assert advice("actor.train", "NVIDIA H100", 10**9, num_ranks=1) == 'TrainOptions(compile="inductor").'
    assert advice("actor.generate", "cpu", 100_000, num_ranks=1) == ""
    assert advice("actor.generate", "cpu", 10**9, num_ranks=1) == "speculation=Speculation()."


def test_predictions_from_data_sheets_of_other_devices_are_left_out(tmp_path: Path) -> None:
    nominal = replace(PREDICTION, source=DATA_SHEETS)
    for name, device in (("known", "NVIDIA H100 80GB HBM3"), ("unknown", "cpu")):
        begun = replace(started(), devices=(device,) * 2)
        write_session(tmp_path / name / "record", begun, [PlanInstalled(step=0, plan=PLAN), nominal], steps=8)
    known, unknown = (content_of(tmp_path / name) for name in ("known", "unknown"))

    def outlines(data: Json) -> list[object]:
        (lanes,) = (chart for chart in section_of(data, "time")["charts"] if chart["kind"] == "lanes")
        return [bar for frame in lanes["frames"] for bar in frame["predicted"]]

    assert outlines(known) and not outlines(unknown)
    assert table_of(known, "time", "predicted-seconds")["rows"]
    assert [table["id"] for table in section_of(unknown, "time")["tables"]] == ["purposes"]
    assert section_of(unknown, "time")["sentences"][-1] == (
        "Predicted seconds are left out: nothing was measured, and no data sheet of cpu is known. "
        "callbacks=[AutoTuner()] measures passes on it."
    )
    assert table_of(unknown, "plans", "plans")["rows"][0][3] is None


@pytest.mark.parametrize(("ratio", "text"), [(0.1383, "0.138 x"), (1.0, "1 x"), (24.31, "24.3 x"), (1234.5, "1,234 x")])
def test_ratios_have_three_digits(ratio: float, text: str) -> None:
    assert quantity(ratio, "x") == text


def test_plans_are_listed_with_their_seconds(folder: Path) -> None:
    data = content_of(folder)

    assert table_of(data, "plans", "plan")["rows"][1] == ["actor.train", "fsdp2@0-1", "micro_batch=4"]
    ((number, begin, end, predicted, measured, *_),) = table_of(data, "plans", "plans")["rows"]
    assert (number, begin, end) == (1, 1, 8)
    assert (predicted["value"], measured["value"]) == (pytest.approx(0.8), pytest.approx(1.0))


def test_rollouts_are_the_newest_first(folder: Path) -> None:
    table = table_of(content_of(folder), "rollouts", "rollouts")

    assert table["rows"][0] == ["7", "0.7", "question 7", "answer 7"]
    assert [column["kind"] for column in table["columns"]] == ["number", "number", "text", "text"]


def test_rollouts_show_conversations_as_lines_and_numbers_before_texts(folder: Path) -> None:
    prompt = json.dumps([{"role": "system", "content": "Be short."}, {"role": "user", "content": "1 + 1?"}])
    row = {
        "step": 1,
        "prompt": prompt,
        "response": "two",
        "num_response_tokens": 1,
        "answer": '[{"a": 1}]',
        "reward": 1.0,
    }
    write_table(folder / "log" / "version_0" / "rollouts.csv", [row])

    table = table_of(content_of(folder), "rollouts", "rollouts")

    names = [column["name"] for column in table["columns"]]
    assert names == ["step", "reward", "num_response_tokens", "prompt", "response", "answer"]
    assert table["rows"] == [["1", "1.0", "1", "system: Be short.\nuser: 1 + 1?", "two", '[{"a": 1}]']]


def test_metrics_of_speculation_are_drawn_and_others_named(folder: Path) -> None:
    log_metrics(folder, {"tokens_per_step/actor.generate": [1.5, 2.0, 2.5]})

    section = section_of(content_of(folder), "generation")

    assert [chart["id"] for chart in section["charts"]] == ["tokens-per-step"]
    assert "sample_reallocation=True" in section["missing"]
    assert "speculation=" not in section["missing"]
    assert section["sentences"][0] == "Drafts save 60 % of the decoding steps of actor.generate in the last tenth."


def test_drafts_that_save_nothing_are_advised_against_and_constants_have_no_chart(folder: Path) -> None:
    log_metrics(folder, {"tokens_per_step/actor.generate": [1.0, 1.0], "moved_samples/actor.generate": [0.0, 0.0]})

    section = section_of(content_of(folder), "generation")

    assert section["charts"] == []
    assert section["sentences"] == [
        "Drafts save 0 % of the decoding steps of actor.generate in the last tenth: leave speculation out, or try "
        "another drafter.",
        "tokens_per_step/actor.generate begins and ends at 1 token, over 2 points.",
        "moved_samples/actor.generate begins and ends at 0 samples, over 2 points.",
    ]


def test_an_error_that_ended_the_run_is_its_first_finding(tmp_path: Path) -> None:
    data = content_of(write_run(tmp_path, error="RuntimeError: out of memory"))

    assert "RuntimeError: out of memory" in section_of(data, "learning")["findings"][0]["text"]
    assert ["iterations", "8 of 10, failed"] in data["facts"]


def test_sections_without_data_say_what_fills_them() -> None:
    data = page_data(run_with(reward=[0.1, 0.2, 0.3]))

    missing = {section["id"]: section["missing"] for section in data["sections"]}
    assert missing.pop("learning") is None
    assert all("callbacks=[" in text or "not logged" in text for text in missing.values())


def test_charts_have_plain_titles_and_validation_next_to_training() -> None:
    names = (
        "reward_std", "val/reward_std", "stopped/model", "val/stopped/model", "response_length",
        "val/response_length/max", "val/response_length", "actor/ratio_max", "critic/ratio_max", "actor/loss",
        "critic/loss", "lr-AdamW", "carried_samples", "val/carried_samples", "advantages/max",
        "queue/actor.generate", "capture_s/actor.generate",
    )  # fmt: skip
    run = run_with(**{name: [0.1, 0.2, 0.3] for name in names})

    charts = section_of(page_data(run), "learning")["charts"]

    assert {chart["title"]: [line["name"] for line in chart["series"]] for chart in charts} == {
        "Response length": ["response_length", "val/response_length"],
        "What ended the responses": ["stopped/model", "val/stopped/model"],
        "Standard deviation of rewards": ["reward_std", "val/reward_std"],
        "Loss": ["actor/loss", "critic/loss"],
        "Learning rate": ["lr-AdamW"],
        "Ratio max": ["actor/ratio_max", "critic/ratio_max"],
        "Advantages, max": ["advantages/max"],
        "Carried samples": ["carried_samples", "val/carried_samples"],
        "Queue": ["queue/actor.generate"],
    }


def test_metrics_that_no_chart_expects_get_charts_of_their_own() -> None:
    data = page_data(run_with(margin=[0.1, 0.2, 0.3], constant=[1.0, 1.0, 1.0]))

    assert [chart["title"] for chart in section_of(data, "learning")["charts"]] == ["Margin"]
    assert "constant 1" in table_of(data, "learning", "final-values")["note"]


def test_scores_have_a_table_and_a_band_with_their_intervals(folder: Path) -> None:
    chances = {f"q{number}": number % 2 for number in range(60)}
    log_scores(folder, "val", dict.fromkeys(chances, 0.0), seed=0, step=4)
    log_scores(folder, "val", chances, seed=0)
    log_scores(folder, "test", {f"q{number}": 1.0 for number in range(10)}, seed=0)
    values = {"val/accuracy": [0.25, 0.5], "val/accuracy/low": [0.15, 0.4], "val/accuracy/high": [0.35, 0.6]}
    log_metrics(folder, values | {"val/num_questions": [60.0, 60.0]})

    data = content_of(folder)

    assert data["problems"] == []
    shown = table_of(data, "learning", "scores")
    assert [row[0] for row in shown["rows"]] == [
        *("val/accuracy", "val/pass@4", "val/maj@4"), *("test/accuracy", "test/pass@4", "test/maj@4")
    ]  # fmt: skip
    accuracy, perfect = shown["rows"][0], shown["rows"][3]
    assert accuracy[1]["value"] == 0.5 and re.fullmatch(r"0.5 \(0.3\d+ to 0.6\d+\)", accuracy[1]["text"])
    assert accuracy[2:] == [60, 8] and perfect[1]["text"] == "1 (1 to 1)"
    assert shown["note"].endswith("With fewer than 50 questions, intervals are too narrow.")
    (band,) = next(one for one in section_of(data, "learning")["charts"] if one["id"] == "held-out")["series"]
    assert (band["y"], band["low"], band["high"]) == ([0.25, 0.5], [0.15, 0.4], [0.35, 0.6])
    assert not [row for row in table_of(data, "learning", "final-values")["rows"] if "/low" in row[0]]


def test_scores_of_an_earlier_run_and_broken_lines_are_left_out(folder: Path) -> None:
    scores = folder / "log" / "version_0" / "record" / SCORES_FILE
    log_scores(folder, "val", {"q": 1.0}, seed=0)
    scores.write_text(scores.read_text().replace("1008.5", "8.5") + '{"name": "val"}\n')

    data = content_of(folder)

    assert data["problems"] == ["scores.jsonl has 1 broken line, line 2; it is left out"]
    assert not [one for one in section_of(data, "learning")["tables"] if one["id"] == "scores"]


def test_scores_alone_are_a_report(tmp_path: Path) -> None:
    log_scores(tmp_path, "test", {"q": 1.0}, seed=0)

    assert table_of(content_of(tmp_path), "learning", "scores")["rows"][0][0] == "test/accuracy"
