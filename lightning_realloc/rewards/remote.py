"""Reward from an HTTP server.

A request is ``POST`` with ``{"prompts": [...], "completions": [...], "columns": {name: [...]}}``, C values each. The
answer is ``{"rewards": [...]}``, C numbers, null where the reward does not apply. The column ``images`` holds a list of
``data:`` addresses for each completion. An empty batch checks that the server is available.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, cast
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

import aiohttp

from lightning_realloc.batch.prompt_images import PromptImages
from lightning_realloc.batch.samples import IMAGES
from lightning_realloc.data.images.image_files import is_pillow_image
from lightning_realloc.errors import RewardError
from lightning_realloc.retries.causes import RETRYABLE_STATUSES
from lightning_realloc.rewards.failure_rule import GIVE_UP_AFTER, Failed, FailureRule, OnFailure, Outcome
from lightning_realloc.rewards.invoke import finite_number
from lightning_realloc.rewards.retries import Retries, retry_after_s
from lightning_realloc.rewards.signatures import without_services
from lightning_realloc.rewards.texts import HIDDEN, SECRET_SUFFIXES, shortened, shown_address
from lightning_realloc.runtime.event_loop import EventLoop

MAX_ANSWER_BYTES = 2**20
"""Largest answer that is read. Rewards of a thousand completions need 30 kB."""
MIN_SECRET_CHARACTERS = 6
"""Length of words in headers that messages hide whatever the header's name is. More shows short keys."""


class RemoteReward:
    """Reward that a server computes, with concurrent requests and retries.

    Args:
        url: Address of the server, ``http://`` or ``https://``.
        name: Name in metrics and messages.
        columns: Columns of the data to send; None sends all. Without ``images``, messages are sent without theirs.
        batch_size: Completions per request; they fail together.
        concurrency: Maximum number of concurrent requests, on every rank that computes rewards.
        timeout_s: Seconds for one request, including the connection.
        retries: Retries after time-outs, lost connections and status codes such as 503.
        headers: HTTP headers of every request.
        token_variable: Environment variable with a token, sent as ``Authorization: Bearer ...``.
        on_failure: ``"fail"`` ends the run if a completion could not be judged, ``"mask"`` leaves its sample out.
        give_up_after: Number of consecutive batches without any result after which ``"mask"`` also ends the run.

    Example:
        >>> reward = RemoteReward("http://localhost:8000/judge", name="judge", columns=["answer"], on_failure="mask")
        >>> reward.required_columns()
        {'answer'}
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        columns: Sequence[str] | None = None,
        batch_size: int = 16,
        concurrency: int = 8,
        timeout_s: float = 60.0,
        retries: Retries | None = None,
        headers: Mapping[str, str] | None = None,
        token_variable: str | None = None,
        on_failure: OnFailure = "fail",
        give_up_after: int = GIVE_UP_AFTER,
    ) -> None:
        self._url_secrets = _secrets_of(url)
        for setting, number in {"batch_size": batch_size, "concurrency": concurrency}.items():
            if number < 1:
                raise RewardError(f"{setting}={number} must be at least 1")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise RewardError(f"timeout_s={timeout_s} must be above 0 and finite")
        self.url = url
        self._shown_url = shown_address(url)
        self.__name__ = name
        self.columns = None if columns is None else tuple(columns)
        self.batch_size = batch_size
        self.concurrency = concurrency
        self.timeout_s = timeout_s
        self.retries = retries or Retries()
        self.on_failure = on_failure
        self.give_up_after = give_up_after
        self._given_headers = dict(headers or {})
        self._headers = {"Accept": "application/json", **self._given_headers}
        self._token_variable = token_variable
        self._rule = FailureRule(name, on_failure, give_up_after)
        self._rng = random.Random()  # for waits only; with a shared seed all ranks would retry at the same time
        self._paused_until = 0.0

    def required_columns(self) -> set[str]:
        """Return the columns that are sent by name."""
        return set(self.columns or ())

    def start(self) -> None:
        """Send an empty batch to check the server.

        Raises:
            RewardError: if the server does not answer correctly.
        """
        loop = EventLoop("rewards")  # not asyncio.run: a notebook already has a running loop
        try:
            answer = loop.submit(self._probe()).result()
        finally:
            loop.close()
        if isinstance(answer, _RequestFailure):
            raise RewardError(
                f"the reward server at {self._shown_url} cannot be used: {answer.reason}; start it before the run, or "
                f"correct the address of {self.__name__!r}"
            )

    async def __call__(
        self, /, prompts: Sequence[object], completions: Sequence[object], **columns: Sequence[object]
    ) -> list[Outcome]:
        """Return the results of B completions.

        Raises:
            RewardError: for a completion that could not be judged, if that ends the run, and for columns that JSON
                cannot represent.
        """
        columns = without_services(columns)
        columns.pop("completion_ids", None)
        sent = columns if self.columns is None else {name: columns[name] for name in self.columns}
        bodies = [
            self._body(prompts, completions, sent, slice(begin, begin + self.batch_size))
            for begin in range(0, len(completions), self.batch_size)
        ]
        semaphore = asyncio.Semaphore(self.concurrency)
        check = partial(self._rule.raise_on_failure, num_completions=len(completions))
        async with self._session() as session:
            requests = [asyncio.ensure_future(self._judge(session, semaphore, *body)) for body in bodies]
            answers = await _checked(requests, check)
        return self._rule.apply([outcome for answer in answers for outcome in answer])

    def _body(
        self,
        prompts: Sequence[object],
        completions: Sequence[object],
        columns: Mapping[str, Sequence[object]],
        rows: slice,
    ) -> tuple[bytes, int]:
        chosen = {name: list(values[rows]) for name, values in columns.items()}
        content = {"prompts": list(prompts[rows]), "completions": list(completions[rows]), "columns": chosen}
        try:
            return json.dumps(content, allow_nan=False, default=self._for_json).encode(), len(content["completions"])
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"{self.__name__}: JSON cannot represent the request ({error}); the columns are {sorted(columns)}, "
                f"list those to send in columns="
            ) from error

    def _for_json(self, value: object) -> object:
        """Return images as ``data:`` addresses, or those of messages as null if the column of images is not sent."""
        if isinstance(value, PromptImages):
            return value.addresses()
        if not is_pillow_image(value):
            raise TypeError(f"{type(value).__name__} is not JSON")
        if self.columns is not None and IMAGES not in self.columns:
            return None
        from lightning_realloc.data.images.lazy_images import image_address  # needs Pillow, which text does without

        return image_address(cast("Any", value))

    # ---- requests
    def _session(self) -> aiohttp.ClientSession:
        headers = dict(self._headers)
        if self._token_variable is not None:
            token = os.environ.get(self._token_variable, "").strip()  # files of secrets end with a line break
            if not token:
                raise RewardError(
                    f"{self.__name__}: the environment variable {self._token_variable} is not set; set it"
                )
            headers["Authorization"] = f"Bearer {token}"
        return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=self.timeout_s))

    async def _probe(self) -> list[float | None] | _RequestFailure:
        async with self._session() as session:
            return await self._send_request(session, *self._body([], [], {}, slice(0)))

    async def _judge(
        self, session: aiohttp.ClientSession, semaphore: asyncio.Semaphore, body: bytes, count: int
    ) -> Sequence[Outcome]:
        """Send a request until it succeeds, or no retry is left."""
        attempt = 0
        while True:
            async with semaphore:
                await self._wait_for_server()
                answer = await self._send_request(session, body, count)
            if not isinstance(answer, _RequestFailure):
                return answer
            wait_s = self.retries.wait_s(attempt, answer.server_wait_s, self._rng) if answer.may_repeat else None
            if wait_s is None:
                times = f", in {attempt + 1} attempts" if attempt else ""
                return [Failed(f"{self._shown_url}{times}: {answer.reason}")] * count
            if answer.server_wait_s is not None:
                self._paused_until = max(self._paused_until, _now_s() + answer.server_wait_s)
            await asyncio.sleep(wait_s)
            attempt += 1

    async def _wait_for_server(self) -> None:
        """Wait until the end of the pause that the server requested in any answer; it applies to all requests."""
        while (left := self._paused_until - _now_s()) > 0:
            await asyncio.sleep(left)

    async def _send_request(
        self, session: aiohttp.ClientSession, body: bytes, count: int
    ) -> list[float | None] | _RequestFailure:
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(self.url, data=body, headers=headers, allow_redirects=False) as response:
                content = await _read(response)
        except TimeoutError:
            return _RequestFailure(f"no answer within timeout_s={self.timeout_s:g} seconds", may_repeat=True)
        except _AnswerTooLong:
            return _RequestFailure(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"{type(error).__name__}: {self._redacted(str(error))}"
            return _RequestFailure(reason, may_repeat=not isinstance(error, ValueError))
        if response.status != 200:
            server_wait_s = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
            may_repeat = response.status in RETRYABLE_STATUSES
            reason = f"it answered {response.status}{self._excerpt(content)}"
            return _RequestFailure(reason, may_repeat, server_wait_s)
        return self._rewards(content, count)

    def _rewards(self, content: bytes, count: int) -> list[float | None] | _RequestFailure:
        """Parse the rewards of an answer."""
        try:
            answer: Any = json.loads(content)
        except (ValueError, RecursionError):
            return _RequestFailure(f"its answer is not JSON{self._excerpt(content)}")
        rewards = answer.get("rewards") if isinstance(answer, Mapping) else None
        if not isinstance(rewards, list):
            return _RequestFailure(f"its answer must be {{'rewards': [...]}}{self._excerpt(content)}")
        if len(rewards) != count:
            return _RequestFailure(
                f"its answer must have one reward for each of {count} completions; it has {len(rewards)}"
            )
        for reward in rewards:
            if reward is not None and finite_number(reward) is None:
                shown = shortened(self._redacted(reward)) if isinstance(reward, str) else self._redacted(repr(reward))
                return _RequestFailure(f"rewards must be finite numbers or null; it answered {shown[:80]}")
        return [None if reward is None else float(reward) for reward in rewards]

    # ---- secrets
    def _excerpt(self, content: bytes) -> str:
        text = " ".join(self._redacted(content.decode(errors="replace"))[:200].split())
        return f": {text}" if text else ""

    def _redacted(self, text: str) -> str:
        """Return a text of the server or of aiohttp without the secrets that were sent."""
        secrets = {*self._url_secrets, os.environ.get(self._token_variable or "", "").strip()}
        for name, value in self._given_headers.items():
            is_secret = name.upper().endswith((*SECRET_SUFFIXES, "AUTHORIZATION", "COOKIE"))
            secrets |= {word for word in value.split() if is_secret or len(word) >= MIN_SECRET_CHARACTERS}
        forms = {form for secret in secrets for form in (secret, quote(secret, safe=""), quote_plus(secret))}
        for form in sorted(forms - {""}, key=len, reverse=True):
            text = text.replace(form, HIDDEN)
        return text


class _AnswerTooLong(Exception):
    """An answer that is longer than `MAX_ANSWER_BYTES`."""


async def _read(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            response.close()
            raise _AnswerTooLong
    return bytes(content)


def _secrets_of(url: str) -> tuple[str, ...]:
    """Return the secrets in an address: password or user, both as they are sent, and the values of the query.

    Raises:
        RewardError: for an address that is not one of a server.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its message repeats parts of the address
        is_address = False
    if not is_address:
        raise RewardError(
            f"url={shown_address(url)!r} must be an address like http://localhost:8000/judge, with a port up to 65535"
        )
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    sent = base64.b64encode(f"{user}:{password}".encode()).decode() if user or password else ""
    return (password or user, sent, *(value for _, value in parse_qsl(parts.query)))


class _RequestFailure:
    """A request without a usable answer."""

    def __init__(self, reason: str, may_repeat: bool = False, server_wait_s: float | None = None) -> None:
        self.reason = reason
        self.may_repeat = may_repeat
        self.server_wait_s = server_wait_s


async def _checked(
    requests: Sequence[asyncio.Future[Sequence[Outcome]]], check: Callable[[Sequence[Outcome]], None]
) -> list[Sequence[Outcome]]:
    """Return all answers. ``check`` sees each answer as it arrives; its exception cancels the other requests."""
    try:
        for answer in asyncio.as_completed(requests):
            check(await answer)
    except BaseException:
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        raise
    return [request.result() for request in requests]


def _now_s() -> float:
    return asyncio.get_running_loop().time()
