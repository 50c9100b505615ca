"""The server as OpenAI's own client sees it."""

from collections.abc import Iterator
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
    usage = {"include_usage": True}
    *chunks, last = client.chat.completions.create(stream=True, stream_options=usage, **options)
    [choice] = plain.choices
    assert choice.message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert choice.message.role == chunks[0].choices[0].delta.role == "assistant"
    assert choice.finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert plain.usage == last.usage
    assert plain.usage.completion_tokens == 25


def test_completions_models_and_errors(client: Any) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "a", "temperature": 0}
    plain = client.completions.create(**options)
    chunks = client.completions.create(stream=True, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=MESSAGES[1:] * 2)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong").models.list()
