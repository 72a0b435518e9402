"""RemoteReward: request bodies, retries, failures that end a run, and limits."""

from __future__ import annotations

import math
import threading
import time
import traceback
from typing import Any

import pytest
import torch

from lightning_realloc.errors import RewardError
from lightning_realloc.rewards import RemoteReward, Retries, RewardFunctions, Rewards
from tests.rewards.server import Answer, reward_server

QUICK = Retries(count=3, first_wait_s=0.01, max_wait_s=5.0)


def judge(reward: RemoteReward, completions: list[str], **columns: list[Any]) -> Rewards:
    functions = RewardFunctions(reward)
    functions.check_columns(list(columns))
    try:
        ids = [[number] for number in range(len(completions))]
        return functions([f"{number}?" for number in range(len(completions))], completions, ids, columns)
    finally:
        functions.close()


def test_batches_are_sent_as_documented_and_results_keep_the_order() -> None:
    def lengths_but_of_b(number: int, asked: dict[str, Any]) -> Answer:
        time.sleep(0.05 * (len(asked["completions"][0]) < 3))  # the first batch is answered last
        return Answer(content={"rewards": [None if text == "bb" else len(text) for text in asked["completions"]]})

    def one(completions: list[str], **columns: Any) -> list[float]:
        return [1.0] * len(completions)

    with reward_server(lengths_but_of_b) as log:
        reward = RemoteReward(log.url, batch_size=2, headers={"X-Run": "seven"})
        functions = RewardFunctions([reward, one])
        columns = {"gold": [1, 2, 3], "level": ["x", None, "z"]}
        rewards = functions(["p", "q", "r"], ["a", "bb", "ccc"], [[1], [2], [3]], columns)
        functions.close()
    assert rewards.total.tolist() == [2.0, 1.0, 4.0]  # null: the function does not apply
    assert sorted(log.requests, key=lambda asked: str(asked["prompts"])) == [
        {"prompts": ["p", "q"], "completions": ["a", "bb"], "columns": {"gold": [1, 2], "level": ["x", None]}},
        {"prompts": ["r"], "completions": ["ccc"], "columns": {"gold": [3], "level": ["z"]}},
    ]
    assert {headers["X-Run"] for headers in log.headers} == {"seven"}
    assert {headers["Content-Type"] for headers in log.headers} == {"application/json"}


def test_columns_are_sent_by_name_and_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with reward_server() as log:
        reward = RemoteReward(log.url, columns=["gold"], token_variable="JUDGE_TOKEN")
        judge(reward, ["a"], gold=["4"], tensor=[object()])
        with pytest.raises(RewardError, match=r"'remote' needs the columns \['gold'\], the data has \['silver'\]"):
            judge(reward, ["a"], silver=["4"])
        with pytest.raises(RewardError, match=r"JSON cannot represent the request .* \['gold'\], list those"):
            judge(reward, ["a"], gold=[object()])
        monkeypatch.delenv("JUDGE_TOKEN")
        with pytest.raises(RewardError, match="the environment variable JUDGE_TOKEN is not set"):
            reward.start()
    assert [asked["columns"] for asked in log.requests] == [{"gold": ["4"]}]
    assert log.headers[0]["Authorization"] == "Bearer secret"


def test_concurrent_requests_are_limited() -> None:
    with reward_server(lambda number, asked: Answer(delay_s=0.02)) as log:
        rewards = judge(RemoteReward(log.url, batch_size=1, concurrency=3), ["a"] * 12)
    assert rewards.total.tolist() == [1.0] * 12
    assert log.most_at_a_time == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_requests_with_temporary_errors_are_repeated(status: int) -> None:
    with reward_server(lambda number, asked: Answer(status if number < 2 else 200)) as log:
        assert judge(RemoteReward(log.url, retries=QUICK), ["abc"]).total.tolist() == [3.0]
    assert len(log.requests) == 3


def test_retry_after_delays_all_requests() -> None:
    def busy_at_first(number: int, asked: dict[str, Any]) -> Answer:
        return Answer(429, headers={"Retry-After": "1"}) if number == 0 else Answer()

    with reward_server(busy_at_first) as log:
        reward = RemoteReward(log.url, batch_size=1, concurrency=1, retries=QUICK)
        assert judge(reward, ["a", "bb", "ccc"]).total.tolist() == [1.0, 2.0, 3.0]
    assert len(log.times) == 4
    assert all(later - log.times[0] >= 0.99 for later in log.times[1:])  # also those without an error


def test_a_server_with_too_long_a_retry_after_is_given_up() -> None:
    with (
        reward_server(lambda number, asked: Answer(503, headers={"Retry-After": "600"})) as log,
        pytest.raises(RewardError, match=r"1 of 1 completions could not be judged; http://127.0.0.1:\d+/judge: it"),
    ):
        judge(RemoteReward(log.url, retries=QUICK), ["a"])
    assert len(log.requests) == 1


def test_a_slow_server_is_retried_and_given_up_in_time() -> None:
    with reward_server(lambda number, asked: Answer(delay_s=30.0)) as log:
        began = time.monotonic()
        rule = r"in 3 attempts: no answer within timeout_s=0\.1 seconds; set on_failure='mask' to"
        with pytest.raises(RewardError, match=rule):
            judge(RemoteReward(log.url, timeout_s=0.1, retries=Retries(count=2, first_wait_s=0.01)), ["a"])
        assert time.monotonic() - began < 20.0  # one response takes 30 seconds
    assert len(log.requests) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(404, {"detail": "no such model"}), r'it answered 404: \{"detail": "no such model"\}'),
        (Answer(302, headers={"Location": "/login"}), "it answered 302"),
        (Answer(content=b"<html>gateway</html>"), "its answer is not JSON: <html>gateway</html>"),
        (Answer(content=[1.0]), r"its answer must be \{'rewards': \[...\]\}: \[1.0\]"),
        (Answer(content={"scores": [1.0]}), "its answer must be"),
        (Answer(content={"rewards": [1.0, 2.0]}), "one reward for each of 1 completions; it has 2"),
        (Answer(content={"rewards": ["1"]}), "finite numbers or null; it answered '1'"),
        (Answer(content=b'{"rewards": [NaN]}'), "finite numbers or null; it answered nan"),
        (Answer(content=b'{"rewards": [1e39]}'), r"finite numbers or null; it answered 1e\+39"),
        (Answer(content={"rewards": [10**400]}), "finite numbers or null; it answered 10000"),
        (Answer(content=b'{"rewards": ' + b"[" * 100_000), "its answer is not JSON"),
        (Answer(content=b'{"rewards": [1.0' + b" " * 2**21 + b"]}"), "its answer is longer than 1048576 bytes"),
    ],
)
def test_permanent_errors_are_raised_without_a_retry(answer: Answer, reason: str) -> None:
    with reward_server(lambda number, asked: answer) as log, pytest.raises(RewardError, match=reason):
        judge(RemoteReward(log.url, retries=QUICK), ["a"])
    assert len(log.requests) == 1


def test_a_failed_request_costs_only_its_own_samples() -> None:
    def fails_for_long_ones(number: int, asked: dict[str, Any]) -> Answer:
        return Answer(500 if max(map(len, asked["completions"])) > 2 else 200)

    with reward_server(fails_for_long_ones) as log:
        reward = RemoteReward(log.url, batch_size=2, retries=QUICK, on_failure="mask", name="judge")
        rewards = judge(reward, ["a", "bb", "ccc", "d", "ee"])
    assert rewards.failed["judge"].tolist() == [False, False, True, True, False]
    assert torch.equal(rewards.total.isnan(), rewards.failed["judge"])
    assert rewards.total[[0, 1, 4]].tolist() == [1.0, 2.0, 2.0]
    assert len(log.requests) == 2 + 4  # one request is sent four times


def test_a_run_that_ends_sends_no_further_requests() -> None:
    with reward_server(lambda number, asked: Answer(400 if asked["completions"] == ["a"] else 200)) as log:
        reward = RemoteReward(log.url, batch_size=1, concurrency=1, name="judge")
        with pytest.raises(RewardError, match=r"judge: 1 of 40 completions could not be judged; http.* answered 400"):
            judge(reward, ["a"] + ["b"] * 39)
        assert len(log.requests) < 30


def test_an_unreachable_server_ends_the_run_even_if_failures_are_masked() -> None:
    with reward_server() as log:
        reward = RemoteReward(log.url, retries=Retries(count=0), on_failure="mask", give_up_after=2)
        assert judge(reward, ["a"]).total.tolist() == [1.0]
    assert math.isnan(judge(reward, ["a"]).total[0])
    with pytest.raises(RewardError, match=r"could be judged in 2 consecutive batches; http://127.*Cannot connect"):
        judge(reward, ["a"])


def test_a_run_starts_only_if_the_server_responds() -> None:
    before = set(threading.enumerate())
    with reward_server() as log:
        RewardFunctions(RemoteReward(log.url)).start()
        assert log.requests == [{"prompts": [], "completions": [], "columns": {}}]
    began = time.monotonic()
    rule = rf"the reward server at {log.url} cannot be used: .*Cannot connect.*; start it before the run, or correct"
    with pytest.raises(RewardError, match=rule):
        RewardFunctions(RemoteReward(log.url)).start()
    assert time.monotonic() - began < 20.0  # the start is not retried
    with reward_server(lambda number, asked: Answer(401)) as log, pytest.raises(RewardError, match="it answered 401"):
        RemoteReward(log.url).start()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "rewards"]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"url": "localhost:8000"}, "url='localhost:8000' must be an address like http://"),
        ({"url": "ftp://host/judge"}, "must be an address"),
        ({"url": "http:///judge"}, "must be an address"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"concurrency": 0}, "concurrency=0 must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0"),
        ({"timeout_s": math.inf}, "timeout_s=inf must be above 0 and finite"),
        ({"on_failure": "ignore"}, "on_failure='ignore' must be one of"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(RewardError, match=rule):
        RemoteReward(**{"url": "http://localhost:1/judge", **settings})


def test_a_password_in_the_address_is_sent_and_never_shown() -> None:
    with reward_server(lambda number, asked: Answer(400)) as log:
        address = log.url.replace("http://", "http://user:secret@")
        with pytest.raises(RewardError) as refused:
            RemoteReward(address).start()
    assert "secret" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)
    assert log.headers[0]["Authorization"].startswith("Basic ")
    for url, shown in {
        "ftp://user:hunter2@host/judge": "ftp://host/judge",
        "http://user:hunter2@host:99999/?api_key=hunter2": "http://host:99999/?***",
        "http://user:hunter2@[::1": "http://[::1",
        "http://user:no/hunter2@host/": "http://***",
        "https://user:hunter2?@host": "https://***",
        "user:hunter2@host/judge": "host/judge",
        "http:///judge?next=http://user:hunter2@host": "http://***",
    }.items():
        with pytest.raises(RewardError) as wrong:
            RemoteReward(url)
        assert f"url={shown!r} must be an address" in str(wrong.value)
        assert "hunter2" not in "".join(traceback.format_exception(wrong.value))


@pytest.mark.parametrize("answer", ["status", "text", "reward", "list"])
def test_secrets_that_an_answer_repeats_are_never_shown(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cr/et token\n")
    secrets = ["s3cr/et token", "s3cr%2Fet%20token", "hidden-key", "pass word", "dXNlcjpwYXNzIHdvcmQ=", "key-of-header"]
    said = " ".join(["no:", *secrets, "x" * 150 + secrets[0]])
    answers = {
        "status": Answer(403, content={"detail": said}),
        "text": Answer(content=said.encode()),
        "reward": Answer(content={"rewards": [said]}),
        "list": Answer(content={"rewards": [[said]]}),
    }
    with reward_server(lambda number, asked: answers[answer]) as log:
        url = log.url.replace("http://", "http://user:pass%20word@") + "?api_key=hidden-key"
        reward = RemoteReward(url, headers={"X-Key": "key-of-header"}, on_failure="mask")
        with pytest.raises(RewardError) as refused:
            reward.start()  # without the token, which would replace the password
        reward = RemoteReward(
            log.url + "?api_key=hidden-key", headers={"X-Key": "key-of-header"}, token_variable="JUDGE_TOKEN"
        )
        with pytest.raises(RewardError) as failed:
            judge(reward, ["a"])
    assert log.headers[-1]["Authorization"] == "Bearer s3cr/et token"
    for error, sent in ((refused, secrets[2:]), (failed, [*secrets[:3], secrets[-1]])):
        assert f"{log.url}?***" in str(error.value)
        assert not [secret for secret in sent if secret in "".join(traceback.format_exception(error.value))]


def test_short_values_of_other_headers_stay_in_messages() -> None:
    headers = {"X-Version": "1", "X-Api-Key": "k3y", "Authorization": "Basic c2U=", "X-Team": "longer-name"}
    answer = Answer(400, {"detail": "limit 1 of 10, k3y c2U= longer-name"})
    rule = r"limit 1 of 10, \*{3} \*{3} \*{3}"
    with reward_server(lambda number, asked: answer) as log, pytest.raises(RewardError, match=rule):
        RemoteReward(log.url, headers=headers).start()
