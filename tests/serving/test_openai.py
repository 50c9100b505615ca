"""The server as OpenAI's own client sees it."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.served import Served, serve

openai = pytest.importorskip("openai", reason="the openai client is not installed")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(api_key="open-sesame") as started:
        yield started


@pytest.fixture(scope="module")
def client(served: Served) -> Any:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key="open-sesame", max_retries=0
    )


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


def test_plain_and_streamed_answers_are_the_same(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "seed": 4, "max_tokens": 25}
    plain = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **options
        )
    )
    text = plain.choices[0].message.content
    assert text
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == text
    assert plain.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert plain.choices[0].finish_reason == chunks[-2].choices[0].finish_reason == "length"
    assert plain.usage == chunks[-1].usage
    assert plain.usage.completion_tokens == 25


def test_completions_models_and_errors(client: Any, served: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "a", "temperature": 0}
    plain = client.completions.create(**options)
    assert "".join(
        each.choices[0].text for each in client.completions.create(stream=True, **options)
    ) == (plain.choices[0].text)
    assert [each.id for each in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "megatoken"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES[1:] * 2)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong").models.list()


def test_eight_clients_at_once_get_the_text_they_get_alone(client: Any) -> None:
    def ask(number: int) -> str:
        messages = [{"role": "user", "content": "word " * (number + 1)}]
        answer = client.chat.completions.create(
            model="tiny", messages=messages, seed=number, max_tokens=20 + number
        )
        return str(answer.choices[0].message.content)

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone


def test_a_stream_that_is_closed_and_the_asynchronous_client(client: Any, served: Served) -> None:
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="open-sesame") as other:
            stream = await other.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, max_tokens=9
            )
            return "".join([each.choices[0].delta.content or "" async for each in stream])

    assert asyncio.run(ask())
