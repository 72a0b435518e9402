"""Classes written for TRL's contract work unchanged: columns, tools, prompts and rewards, plain and asynchronous."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from lightning_realloc.environments.trl_environment import TrlEnvironment
from lightning_realloc.errors import ConfigError
from tests.environments.some_tools import AsyncCounter, Counter, call, turn

ROW = {"prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "Reach 10."}], "start": 7}


def trl(wrapped: Any, **settings: Any) -> TrlEnvironment:
    return TrlEnvironment(wrapped, **settings)


async def contents(environment: TrlEnvironment, *calls: Any) -> list[Any]:
    return [message["content"] for message in (await environment.step(turn(*calls))).messages]


def test_a_counter_of_trl_is_reset_called_and_rewarded() -> None:
    async def episode() -> None:
        counter = Counter()
        environment = trl(counter)
        assert [tool.name for tool in environment.tools] == ["increment"]
        begun = await environment.reset(ROW)
        assert begun == [ROW["prompt"][0], {"role": "user", "content": "Reach 10. It begins at 7."}]  # type: ignore[index]
        assert counter.columns == {"prompt": ROW["prompt"]}
        assert await contents(environment, call("increment", {"step": 1}), call("increment", {"step": 2})) == [
            "8",
            "10",
        ]
        assert (await environment.step(turn(content="Done."))).done
        assert await environment.get_reward() == 10.0

    asyncio.run(episode())
    assert ROW["prompt"][1]["content"] == "Reach 10."  # type: ignore[index]


def test_an_asynchronous_counter_works_as_well() -> None:
    async def episode() -> None:
        environment = trl(AsyncCounter())
        assert [tool.name for tool in environment.tools] == ["increment"]
        assert await environment.reset({"answer": 3}) == [{"role": "user", "content": " Go."}]
        assert await contents(environment, call("increment", {"step": 3})) == ["3"]
        assert not environment.has_reward and await environment.get_reward() is None

    asyncio.run(episode())


@pytest.mark.parametrize(
    ("prompt", "last"),
    [
        ("Reach 10.", "Reach 10. It begins at 7."),
        (None, " It begins at 7."),
        (
            [{"role": "user", "content": [{"type": "text", "text": "Reach 10."}]}],
            [{"type": "text", "text": "Reach 10."}, {"type": "text", "text": " It begins at 7."}],
        ),
    ],
)
def test_the_text_of_reset_ends_the_prompt_in_each_of_its_forms(prompt: object, last: object) -> None:
    begun = asyncio.run(trl(Counter()).reset({"prompt": prompt, "start": 7}))
    assert begun is not None and begun[-1] == {"role": "user", "content": last}


def test_a_reset_without_text_keeps_the_rows_prompt_and_gets_only_the_columns_that_it_takes() -> None:
    class Sparse:
        def reset(self, answer: int) -> None:
            self.answer = answer

    sparse, counter = Sparse(), Counter()
    assert asyncio.run(trl(sparse).reset({**ROW, "answer": 3})) is None and sparse.answer == 3
    assert asyncio.run(trl(counter, control_column="environment").reset({"environment": "math", "level": 2})) is None
    assert counter.columns == {"level": 2}
    odd = {"method": 1, "function": 2}
    assert asyncio.run(trl(counter).reset(odd)) is None and counter.columns == odd


def test_methods_of_base_classes_are_tools_in_the_order_of_their_names() -> None:
    class More(Counter):
        @staticmethod
        def double(number: int) -> int:
            """Double a number.

            Args:
                number: The number.
            """
            return 2 * number

        def close(self) -> None:
            """Release it; no tool."""

    assert [tool.name for tool in trl(More()).tools] == ["double", "increment"]


@pytest.mark.parametrize(
    ("prompt", "content"),
    [("Look.", "Look. One. Two."), ([{"type": "text", "text": "Look."}], ["Look.", " One.", " Two."])],
)
def test_a_reset_may_return_its_text_in_parts(prompt: Any, content: Any) -> None:
    class Parts(Counter):
        def reset(self, **columns: Any) -> Any:
            return [{"type": "text", "text": " One."}, {"type": "text", "text": " Two."}]

    begun = asyncio.run(trl(Parts()).reset({"prompt": [{"role": "user", "content": prompt}]}))
    expected = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
    assert begun == [{"role": "user", "content": expected}]


class Sounds(Counter):
    def reset(self, **columns: Any) -> Any:
        return [{"type": "audio", "audio": b""}, {"type": "text", "text": " Describe it."}]


class Numbers(Counter):
    def reset(self, **columns: Any) -> Any:
        return 7


class Stepping(Counter):
    def step(self, action: str) -> str:
        """Act.

        Args:
            action: What to do.
        """
        return action


class Undocumented:
    def reset(self) -> None: ...

    def increment(self, step: int) -> int:
        return step


def test_objects_outside_the_contract_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"Numbers\.reset must return text or parts to append to the prompt, or None; .* 7"
    ):
        asyncio.run(trl(Numbers()).reset({}))
    with pytest.raises(ConfigError, match=r"Sounds\.reset must return texts and images: .* of type audio.*; describe"):
        asyncio.run(trl(Sounds()).reset({}))
    with pytest.raises(ConfigError, match=r"Stepping has a method 'step'.*derive from MessageEnvironment.*rename"):
        trl(Stepping())
    with pytest.raises(ConfigError, match="'increment' cannot be described to the model"):
        trl(Undocumented())
    with pytest.raises(ConfigError, match="the row's prompt must be text or messages"):
        asyncio.run(trl(Counter()).reset({"prompt": [1], "start": 7}))


def test_an_object_is_given_back_once_unless_it_has_close() -> None:
    back: list[object] = []

    class Closing(Counter):
        closed = 0

        def close(self) -> None:
            self.closed += 1

    counter, closing = Counter(), Closing()
    for wrapped in (counter, closing):
        environment = trl(wrapped, give_back=back.append)
        asyncio.run(environment.close())
    asyncio.run(trl(counter).close())
    assert back == [counter] and closing.closed == 1


def test_an_object_whose_method_may_still_run_is_not_given_back() -> None:
    back: list[object] = []
    release = threading.Event()

    class Slow(Counter):
        def wait(self) -> None:
            """Wait for ever."""
            release.wait(10)

        async def reset(self, **columns: Any) -> str:  # type: ignore[override]
            await asyncio.Event().wait()
            return ""

    async def episodes() -> None:
        environment = trl(Slow(), give_back=back.append, tool_deadline_s=0.02)
        assert "did not answer" in (await contents(environment, call("wait", {})))[0]
        await environment.close()
        environment = trl(Slow(), give_back=back.append)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.reset({}), 0.01)
        await environment.close()
        release.set()

    asyncio.run(episodes())
    assert back == []
