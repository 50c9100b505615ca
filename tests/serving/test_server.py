"""The server's answers over HTTP, and the requests it refuses."""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest

from megatoken.data.chat_template import Message, find_template
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate_ids
from tests.serving.served import CHAT, COMPLETIONS, SIZES, Served, build_model, serve

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def generate_text(prompt: str, tokens: int, **options: Any) -> str:
    """Return what `generate_ids` alone writes."""
    model, tokenizer = build_model()
    ids = tokenizer.encode(prompt).tolist()
    stop_ids = (tokenizer.eot,)
    [new_ids] = generate_ids(
        model, ids, Sampling(max_new_tokens=tokens, stop_ids=stop_ids, **options)
    )
    return tokenizer.decode(new_ids)


def test_completion_equals_generate(served: Served):
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    answer = served.complete("ab", max_tokens=20, **options)
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": generate_text("ab", 20, **options),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer["usage"] == {
        **{"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22},
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    for prompt in ([97, 98], [[97, 98]], ["ab"]):
        assert served.complete(prompt, max_tokens=20, **options)["choices"] == [choice]
    assert served.complete("ab", temperature=0)["usage"]["completion_tokens"] == 16
    greedy = served.complete("q", max_tokens=30, temperature=2, top_p=0)["choices"][0]["text"]
    assert greedy == generate_text("q", 30, temperature=0)


def test_chat_uses_the_template(served: Served):
    messages = [("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    rows: list[Any] = [{"role": role, "content": content} for role, content in messages]
    rows[3]["content"] = [{"type": "text", "text": "c"}]
    model, tokenizer = build_model()
    ids, _ = find_template(tokenizer).encode([Message(*row) for row in messages], reply=True)
    [expected] = generate_ids(model, ids, Sampling(max_new_tokens=12, temperature=0))
    body = {"messages": rows, "temperature": 0}
    answer = served.post(CHAT, max_completion_tokens=12, **body).json()
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(expected)}
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert served.post(CHAT, **body).json()["usage"]["total_tokens"] <= SIZES.seq_len


def test_stop_token_ends_an_answer_and_is_not_shown(served: Served):
    model, tokenizer = build_model()
    template = find_template(tokenizer)
    ids, _ = template.encode([Message("user", "hello")], reply=True)
    room = SIZES.seq_len - len(ids)
    for seed in range(40):
        [free] = generate_ids(model, ids, Sampling(max_new_tokens=room, temperature=2.0, seed=seed))
        text_ids = list(itertools.takewhile(lambda id: id not in template.stop_ids, free))
        if len(text_ids) < room:
            break
    answer = served.chat("hello", seed=seed, temperature=2.0)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == tokenizer.decode(text_ids)
    assert answer["usage"]["completion_tokens"] == len(text_ids) + 1


def test_stream_is_the_same_text_in_pieces(served: Served):
    options: dict[str, Any] = {"seed": 5, "max_tokens": 30, "temperature": 1.2}
    plain = served.chat("x", **options)["choices"][0]
    messages = [{"role": "user", "content": "x"}]
    usage_options = {"include_usage": True}
    events = served.stream(CHAT, messages=messages, stream_options=usage_options, **options)
    *pieces, usage = events
    choices = [event["choices"][0] for event in pieces]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 29
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == plain["message"]["content"]
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    assert choices[-1]["finish_reason"] == plain["finish_reason"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    events = served.stream(COMPLETIONS, prompt="x", **options)
    text = "".join(event["choices"][0]["text"] for event in events)
    expected = generate_text("x", 30, seed=5, temperature=1.2)
    assert text == expected.replace("<|im_start|>", "")  # control tokens are not shown


def test_stop_text_cuts_the_answer_and_is_never_shown_in_part(served: Served):
    free = generate_text("q", 30, temperature=0)
    stop = free[11:14]
    expected = free[: free.index(stop)]
    body: dict[str, Any] = {"prompt": "q", "max_tokens": 30, "temperature": 0}
    [choice] = served.complete(stop=["\0never", stop], **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    events = served.stream(COMPLETIONS, stop=["\0never", stop], **body)
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"
    [choice] = served.complete(stop=free[-2:] + "\0", **body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (free, "length")


def test_truncation_drops_the_oldest_turns(served: Served):
    turns = [{"role": ("user", "assistant")[i % 2], "content": str(i) * 40} for i in range(5)]
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
    refused = served.post(CHAT, messages=turns, **body)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    last = served.post(CHAT, messages=turns[4:], **body).json()["choices"]
    truncated = served.post(CHAT, messages=turns, truncation="auto", **body)
    assert truncated.headers["Dropped-Messages"] == "4"
    assert truncated.json()["choices"] == last
    long = [{"role": "user", "content": "a" * 200}]
    assert served.post(CHAT, messages=long, truncation="auto", **body).status_code == 400
    assert served.post(CHAT, messages=turns[:1], truncation="auto").status_code == 200


def test_concurrent_clients_get_the_text_they_get_alone(served: Served):
    def ask(number: int) -> str:
        options = {"seed": number, "max_tokens": 20 + 9 * number, "temperature": number % 3 / 2}
        text = "hello " * (1 + number % 4)
        return str(served.chat(text, **options)["choices"][0]["message"]["content"])

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) == 8


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_row_and_the_place_in_the_queue(stream: bool):
    with serve(rows=1, waiting=1) as served, ExitStack() as stack:
        hook = served.engine.model.norm.register_forward_hook(lambda *_: time.sleep(0.02))
        stack.callback(hook.remove)
        body = {
            "model": "tiny",
            "prompt": "a",
            "max_tokens": 150,
            "temperature": 0,
            "stream": stream,
        }
        connections = []
        for count in (1, 2):
            connection = HTTPConnection("127.0.0.1", served.port)
            stack.callback(connection.close)
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            connections.append(connection)
            wait_for(lambda count=count: sum(served.engine.counts) == count)
        refused = served.post(COMPLETIONS, prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        connections[1].close()
        wait_for(lambda: served.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200)
        connections[0].close()
        wait_for(lambda: served.engine.counts == (0, 0))
        assert served.complete("a", max_tokens=1)


def test_free_row_takes_a_request_without_a_queue():
    with serve(rows=1, waiting=0) as served:
        for _ in range(3):
            wait_for(lambda: served.engine.counts == (0, 0))
            served.complete("a", max_tokens=2)


def test_api_key():
    keys = {None: 401, "wrong": 401, "\xfc": 401, "open-sesame": 200}
    with serve(api_key="open-sesame") as served:
        for key, status in keys.items():
            headers = {"Authorization": f"Bearer {key}".encode("latin-1")} if key else {}
            assert served.client.get("/v1/models", headers=headers).status_code == status
        assert served.post(COMPLETIONS, prompt="a").status_code == 401
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/").status_code == 200


def test_foreign_hosts_and_content_types_are_refused(served: Served):
    """A web page's requests carry its own Host (DNS rebinding) or a simple Content-Type (CORS)."""
    hosts = {"localhost:8000": 200, "[::1]:8000": 200, "127.0.0.1.evil.example:8000": 400, "": 400}
    for host, status in hosts.items():
        for path in ("/", "/v1/models"):
            response = served.client.get(path, headers={"Host": host})
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["type"] == "invalid_request_error"
    content = '{"model": "tiny", "prompt": "a"}'
    for content_type, status in {"application/json; charset=utf-8": 200, "text/plain": 415}.items():
        headers = {"Content-Type": content_type}
        response = served.client.post(COMPLETIONS, content=content, headers=headers)
        assert response.status_code == status
        assert "Access-Control-Allow-Origin" not in response.headers
    with serve(hosts=["*"]) as open_server:
        assert open_server.client.get("/", headers={"Host": "192.168.0.1:80"}).status_code == 200


USER = {"role": "user", "content": "a"}
# The parameter that the error names, if it names one, and the body. LONG: 200 letters.
INVALID_CHATS = """
messages {}
- {"messages": []}
- {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
- {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}
tool_choice {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}
response_format {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}
messages {"messages": [{"role": "user", "content": "LONG"}]}
"""
INVALID_COMPLETIONS = """
- {"prompt": []}
prompt {"prompt": "LONG"}
prompt {"prompt": "a", "max_tokens": 160}
max_tokens {"prompt": "a", "max_tokens": 0}
temperature {"prompt": "a", "temperature": -1}
stop {"prompt": "a", "stop": [""]}
n {"prompt": "a", "n": 0}
echo {"prompt": "a", "echo": true}
frequency_penalty {"prompt": "a", "frequency_penalty": 0.5}
presence_penalty {"prompt": "a", "presence_penalty": -1}
logit_bias {"prompt": "a", "logit_bias": {"9": 1}}
min_p {"prompt": "a", "min_p": 0.1}
"""


def assert_invalid(response: httpx2.Response, param: str | None) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    ("path", "table"), [(CHAT, INVALID_CHATS), (COMPLETIONS, INVALID_COMPLETIONS)]
)
def test_invalid_requests(served: Served, path: str, table: str):
    for row in table.strip().splitlines():
        param, body = row.replace("LONG", "a" * 200).split(maxsplit=1)
        response = served.post(path, **json.loads(body))
        assert_invalid(response, None if param == "-" else param)
    assert_invalid(
        served.post(CHAT, messages=[USER, {**USER, "role": "assistant"}] * 300), "messages"
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff{}", rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}'],
)
def test_bodies_that_are_not_text_are_invalid(served: Served, content: bytes):
    headers = {"Content-Type": "application/json"}
    assert_invalid(served.client.post(CHAT, content=content, headers=headers), None)


def test_other_statuses(served: Served):
    assert served.post(COMPLETIONS, model="gpt-4", prompt="a").status_code == 404
    assert served.client.get("/v1/models/gpt-4").status_code == 404
    assert served.post("/v1/nothing").status_code == 404
    assert served.client.get(CHAT).status_code == 405
    large = served.post(COMPLETIONS, prompt="a" * (5 << 20))
    assert (large.status_code, "message" in large.json()["error"]) == (413, True)
    defaults = {"n": 1, "user": "me", "presence_penalty": 0.0, "tools": [], "seed": None}
    assert served.complete("a", **defaults)


def test_model_without_a_template_only_completes():
    with serve(chat=False) as served:
        served.complete("a", max_tokens=2)
        assert served.client.get("/v1/models").json()["data"][0]["chat"] is False
        refused = served.post(CHAT, messages=[USER])
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "no_chat_template"


def test_server_survives_a_failing_model(monkeypatch: pytest.MonkeyPatch):
    with serve() as served:
        for name in ("megatoken.sampling.batch.KeyValueCache", "torch.Generator"):
            with monkeypatch.context() as context:
                context.setattr(name, lambda *_, **__: 1 / 0)
                statuses = [served.post(COMPLETIONS, prompt="a").status_code for _ in range(2)]
                assert statuses == [500, 500]
        assert served.engine.counts == (0, 0)
        nan = float("nan")
        hook = served.engine.model.norm.register_forward_hook(lambda _, __, hidden: hidden * nan)
        plain = served.post(COMPLETIONS, prompt="a")
        streamed = served.post(COMPLETIONS, prompt="a", stream=True)
        hook.remove()
        assert plain.status_code == 500
        error = json.loads(streamed.text.removeprefix("data: "))["error"]
        assert error == plain.json()["error"]
        served.complete("a", max_tokens=2)
