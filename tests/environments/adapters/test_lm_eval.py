"""Tasks of lm-eval as evaluation sets, compared with lm-eval's own evaluation of the same responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc import Evaluation, EvaluationSet, SamplingParams
from lightning_realloc.errors import ConfigError, DataError
from lightning_realloc.scores.bootstrap import intervals
from tests.data.test_prompts import CHAT_TEMPLATE
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

from lm_eval.api.model import LM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from lightning_realloc.environments.adapters.lm_eval import LmEvalTask  # noqa: E402

ANSWERS = [f"So 2 + {number} is {number + 2}. #### {number + 2}" for number in range(6)]
"""Targets of the documents; the first response to each is right in a form that one filter reads, or wrong."""
RESPONSES = ["#### 2", "It is 3.", "#### 5\nQ: 4", "4", "#### 6Q: #### 7", "#### 1,007"]
YAML = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/sums.jsonl, test: {folder}/sums.jsonl}}}}
output_type: {kind}
fewshot_split: train
test_split: test
description: "Add.\\n"
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_target: "{{{{answer}}}}"
num_fewshot: {shots}
generation_kwargs: {{until: ["Q:", "\\n\\n"], do_sample: false, max_gen_toks: 7}}
metric_list:
  - {{metric: {metric}, aggregation: mean, higher_is_better: true{ignored}}}
filter_list:
  - name: strict
    filter: [{{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}, {{function: take_first}}]
  - name: flexible
    filter:
      - {{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}}
      - {{function: take_first}}
  - name: first_of_8
    filter: [{{function: take_first_k, k: 8}}, {{function: take_first}}]
"""
IGNORED = ', ignore_case: true, regexes_to_ignore: [",", "(?s).*#### ", "\\\\.$"]'


def write_task(folder: Path, **changes: Any) -> str:
    """Write a task with its data, and return the path of its YAML."""
    rows = [{"question": f"2 + {number}?", "answer": answer} for number, answer in enumerate(ANSWERS)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"kind": "generate_until", "shots": 2, "metric": "exact_match", "ignored": IGNORED, **changes}
    (folder / "sums.yaml").write_text(YAML.format(folder=folder, **settings))
    return str(folder / "sums.yaml")


class Scripted(LM):  # type: ignore[misc]
    """Gives each document its scripted response, cut at the stop strings, and keeps prompts."""

    tokenizer_name = "scripted"

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[Any] = []

    def generate_until(self, requests: list[Any]) -> list[str]:
        """Return the responses of the documents."""
        self.prompts = [request.args[0] for request in requests]
        responses = [RESPONSES[request.doc_id] for request in requests]
        for stop in requests[0].args[1]["until"]:
            responses = [response.split(stop)[0] for response in responses]
        return responses

    def apply_chat_template(self, messages: list[Any], add_generation_prompt: bool = True) -> str:
        """Return the messages as JSON."""
        return json.dumps(messages)

    def loglikelihood(self, requests: list[Any]) -> Any:
        """Refuse."""
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


@pytest.mark.parametrize("as_messages", [False, True])
def test_prompts_and_scores_are_those_of_lm_eval(tmp_path: Path, as_messages: bool) -> None:
    path, model = write_task(tmp_path), Scripted()
    manager = TaskManager(include_defaults=False)
    task = manager.load(path)["tasks"]["sums"]
    task._filters.pop()  # of eight responses
    found = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=manager, apply_chat_template=as_messages, bootstrap_iters=0
    )
    values = {}
    for name in ("strict", "flexible"):
        ours = LmEvalTask(f"{path}:{name}")
        rows = ours.rows(None, as_messages=as_messages)
        prompts = [json.dumps(row["prompt"]) if as_messages else row["prompt"] for row in rows]
        assert prompts == model.prompts and len({*prompts}) == len(ANSWERS)
        scores = ours(RESPONSES, [row["lm_eval"] for row in rows])
        values[name] = sum(scores) / len(scores)
        assert values[name] == pytest.approx(found["results"]["sums"][f"exact_match,{name}"])
    assert 0 < values["strict"] < values["flexible"] < 1
    assert LmEvalTask(path)(RESPONSES, range(6)) == LmEvalTask(f"{path}:strict")(RESPONSES, range(6))
    assert LmEvalTask(path).rows(2, as_messages=as_messages) == ours.rows(None, as_messages=as_messages)[:2]


def test_sampling_is_that_of_the_task_with_its_stop_strings(tmp_path: Path) -> None:
    task = LmEvalTask(write_task(tmp_path))
    assert task.sampling(None) == SamplingParams(max_new_tokens=7, temperature=0.0, stop_strings=("Q:", "\n\n"))
    given = SamplingParams(n=4, stop_strings=("Q:", "!"))
    assert task.sampling(given) == SamplingParams(n=4, stop_strings=("Q:", "!", "\n\n"))


def test_a_run_evaluates_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_task(tmp_path, shots=0)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    module = runs.sft(actor=tiny_model("llama", vocab_size=320), tokenizer=tokenizer)
    sampled = EvaluationSet(f"lm-eval:{path}", sampling=SamplingParams(n=2, max_new_tokens=4), limit=3)
    trainer = runs.trainer(
        "realloc", 1, callbacks=[Evaluation({"task": EvaluationSet(f"lm-eval:{path}"), "two": sampled})]
    )
    trainer.fit(module, runs.Batches(1, responses=True))
    assert len(module.question_scores["eval/task"].questions) == 6
    assert {*intervals(module.question_scores["eval/two"])} == {"accuracy", "pass@2"}
    assert module.question_scores["eval/two"].num_responses == (2, 2, 2)


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("gsm9k", {}, "has no task 'gsm9k'.*lm-eval ls tasks"),
        ("{path}:strictly", {}, "has no filter 'strictly'; it has strict, flexible, first_of_8"),
        ("{path}:first_of_8", {}, "'first_of_8' .* do not score single responses .*:FILTER"),
        (
            "{path}",
            {"kind": "loglikelihood", "metric": "acc", "ignored": ""},
            r"scores by likelihoods \(loglikelihood\)",
        ),
    ],
)
def test_tasks_that_cannot_be_scored_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], rule: str) -> None:
    path = write_task(tmp_path, **changes)
    with pytest.raises(ConfigError, match=rule):
        LmEvalTask(name.format(path=path))


def test_data_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    (tmp_path / "sums.jsonl").unlink()
    with pytest.raises(DataError, match="lm-eval cannot read the task"):
        LmEvalTask(path)
