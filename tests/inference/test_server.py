"""The server's answers over HTTP, and the requests it refuses."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from typing import Any

import httpx2
import pytest
import torch

from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.text.chat_template import Message, find_template
from tests.inference.served import CHAT, COMPLETIONS, SIZES, Served, build_model, serve, user
from tests.processes import HANG_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


def generate_text(prompt: str, tokens: int, **options: Any) -> str:
    """Return what `generate_ids` alone writes."""
    model, tokenizer = build_model()
    sampling = Sampling(max_new_tokens=tokens, stop_ids=(tokenizer.eot,), **options)
    [new_ids] = generate_ids(model, tokenizer.encode(prompt).tolist(), sampling)
    return tokenizer.decode(new_ids)


def test_completion_equals_generate(served: Served):
    options = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    text = generate_text("ab", 20, **options)
    answer = served.complete("ab", max_tokens=20, **options)
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    assert answer["choices"] == [choice]
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    for prompt in ([97, 98], [[97, 98]], ["ab"]):
        assert served.choose(prompt, max_tokens=20, **options) == choice
    assert served.complete("ab", temperature=0)["usage"]["completion_tokens"] == 16
    greedy = served.choose("q", max_tokens=30, temperature=2, top_p=0)
    assert greedy["text"] == generate_text("q", 30, temperature=0)


def test_chat_uses_the_template(served: Served):
    messages = [("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    rows = [{"role": role, "content": content} for role, content in messages]
    rows[3]["content"] = [{"type": "text", "text": "c"}]
    model, tokenizer = build_model()
    ids, _ = find_template(tokenizer).encode([Message(*row) for row in messages], reply=True)
    [expected] = generate_ids(model, ids, Sampling(max_new_tokens=12, temperature=0))
    answer = served.answer(CHAT, messages=rows, temperature=0, max_completion_tokens=12)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(expected)}
    assert (answer["object"], choice["finish_reason"]) == ("chat.completion", "length")
    assert answer["usage"]["prompt_tokens"] == len(ids)
    unlimited = served.answer(CHAT, messages=rows, temperature=0)
    assert unlimited["usage"]["total_tokens"] <= SIZES.seq_len


def test_stop_token_ends_an_answer_and_is_not_shown(served: Served):
    for seed in range(40):
        answer = served.chat("hello", seed=seed, temperature=2.0)
        [choice] = answer["choices"]
        if choice["finish_reason"] == "stop":
            break
    n = answer["usage"]["completion_tokens"]
    model, tokenizer = build_model()
    template = find_template(tokenizer)
    ids, _ = template.encode([Message("user", "hello")], reply=True)
    [free] = generate_ids(model, ids, Sampling(n, temperature=2.0, seed=seed))
    assert [id in template.stop_ids for id in free] == [False] * (n - 1) + [True]
    assert choice["message"]["content"] == tokenizer.decode(free[:-1])


def test_stream_is_the_same_text_in_pieces(served: Served):
    options = {"seed": 5, "max_tokens": 30, "temperature": 1.2}
    [plain] = served.chat("x", **options)["choices"]
    body = options | {"messages": [user("x")], "stream_options": {"include_usage": True}}
    events = served.stream(CHAT, **body)
    *pieces, usage = events
    choices = [event["choices"][0] for event in pieces]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * 29
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == plain["message"]["content"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * 29 + [plain["finish_reason"]]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    events = served.stream(COMPLETIONS, prompt="x", **options)
    text = "".join(event["choices"][0]["text"] for event in events)
    expected = generate_text("x", 30, seed=5, temperature=1.2)
    assert text == expected.replace("<|im_start|>", "")  # control tokens are not shown


def test_stop_text_cuts_the_answer_and_is_never_shown_in_part(served: Served):
    free = generate_text("q", 30, temperature=0)
    stop = ["\0never", free[11:14]]
    expected = free[: free.index(free[11:14])]
    body = {"prompt": "q", "max_tokens": 30, "temperature": 0}
    choice = served.choose(stop=stop, **body)
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    pieces = [event["choices"][0] for event in served.stream(COMPLETIONS, stop=stop, **body)]
    assert "".join(piece["text"] for piece in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"
    choice = served.choose(stop=free[-2:] + "\0", **body)
    assert (choice["text"], choice["finish_reason"]) == (free, "length")


def test_truncation_drops_the_oldest_turns(served: Served):
    turns = [{"role": ("user", "assistant")[i % 2], "content": str(i) * 40} for i in range(5)]
    body = {"temperature": 0, "max_tokens": 30}
    refused = served.post(CHAT, messages=turns, **body)
    code = refused.json()["error"]["code"]
    assert (refused.status_code, code) == (400, "context_length_exceeded")
    last = served.answer(CHAT, messages=turns[4:], **body)
    truncated = served.post(CHAT, messages=turns, truncation="auto", **body)
    assert truncated.headers["Dropped-Messages"] == "4"
    assert truncated.json()["choices"] == last["choices"]
    for messages, status in ([user("a" * 200)], 400), (turns[:1], 200):
        assert served.post(CHAT, messages=messages, truncation="auto").status_code == status


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_frees_the_row_and_the_place_in_the_queue(stream: bool):
    gate = threading.Event()
    steps = []
    with serve(rows=1, waiting=1) as served, ExitStack() as stack:
        engine = served.engine
        hook = engine.model.norm.register_forward_hook(lambda *_: steps.append(gate.wait()))
        stack.callback(hook.remove)
        stack.callback(gate.set)

        def connect(tokens, counts):
            connection = HTTPConnection("127.0.0.1", served.port, timeout=HANG_SECONDS)
            stack.callback(connection.close)
            body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "stream": stream}
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, json.dumps(body), headers)
            wait_until(lambda: engine.counts == counts)
            wait_until(lambda: not any(each.is_cancelled for each in engine._waiting))
            return connection

        running, waiting = connect(150, (1, 0)), connect(150, (1, 1))
        refused = served.post(COMPLETIONS, prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        waiting.close()
        wait_until(lambda: engine._waiting[0].is_cancelled)
        last = connect(1, (1, 1))
        [row] = engine._running.values()
        running.close()
        wait_until(lambda: row.is_cancelled)
        gate.set()
        assert last.getresponse().status == 200
        assert len(steps) < 9  # of 150


def test_free_row_takes_a_request_without_a_queue():
    with serve(rows=1, waiting=0) as served:
        for _ in range(3):
            wait_until(lambda: served.engine.counts == (0, 0))
            served.complete("a", max_tokens=2)


def test_api_key():
    keys = {"Bearer wrong": 401, "Bearer \xfc": 401, "": 401, "Bearer open-sesame": 200}
    with serve(api_key="open-sesame") as served:
        for key, status in keys.items():
            headers = {"Authorization": key.encode("latin-1")}
            assert served.client.get("/v1/models", headers=headers).status_code == status
        for path in ("/health", "/"):
            assert served.client.get(path).status_code == 200
        assert served.post(COMPLETIONS, prompt="a").status_code == 401


def test_foreign_hosts_and_content_types_are_refused(served: Served):
    """A web page's requests carry its own Host (DNS rebinding) or a simple Content-Type (CORS)."""
    hosts = {"localhost:8000": 200, "[::1]:8000": 200, "127.0.0.1.evil.example:8000": 400, "": 400}
    for host, status in hosts.items():
        for path in ("/", "/v1/models"):
            response = served.client.get(path, headers={"Host": host})
            assert response.status_code == status
            assert status == 200 or response.json()["error"]["type"] == "invalid_request_error"
    for content_type, status in {"application/json; charset=utf-8": 200, "text/plain": 415}.items():
        body = '{"model": "tiny", "prompt": "a"}'
        headers = {"Content-Type": content_type}
        response = served.client.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == status
        assert "Access-Control-Allow-Origin" not in response.headers
    with serve(hosts=["*"]) as open_server:
        assert open_server.client.get("/", headers={"Host": "192.168.0.1:80"}).status_code == 200


# The parameter that the error names, if it names one, and the body. LONG: 200 letters.
INVALID_CHATS = """\
messages {}
- {"messages": []}
- {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
- {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}
tool_choice {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}
response_format {"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}}
messages {"messages": [{"role": "user", "content": "LONG"}]}
"""
INVALID_COMPLETIONS = """\
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


BODIES = [
    b"",
    b"\xff{}",
    rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}',
]


def assert_invalid(response: httpx2.Response, param: str | None) -> None:
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


def test_invalid_requests(served: Served):
    for path, table in ((CHAT, INVALID_CHATS), (COMPLETIONS, INVALID_COMPLETIONS)):
        for row in table.splitlines():
            param, body = row.replace("LONG", "a" * 200).split(maxsplit=1)
            response = served.post(path, **json.loads(body))
            assert_invalid(response, None if param == "-" else param)
    turns = [user("a"), {"role": "assistant", "content": "a"}] * 300
    assert_invalid(served.post(CHAT, messages=turns), "messages")
    for content in BODIES:
        headers = {"Content-Type": "application/json"}
        assert_invalid(served.client.post(CHAT, content=content, headers=headers), None)


def test_other_statuses(served: Served):
    for response, status in (
        (served.post(COMPLETIONS, model="gpt-4", prompt="a"), 404),
        (served.client.get("/v1/models/gpt-4"), 404),
        (served.post("/v1/nothing"), 404),
        (served.client.get(CHAT), 405),
        (served.post(COMPLETIONS, prompt="a" * (5 << 20)), 413),
    ):
        assert (response.status_code, "message" in response.json()["error"]) == (status, True)
    defaults = {"n": 1, "user": "me", "presence_penalty": 0.0, "tools": [], "seed": None}
    assert served.complete("a", **defaults)


def test_model_without_a_template_only_completes():
    with serve(chat=False) as served:
        served.complete("a", max_tokens=2)
        assert served.client.get("/v1/models").json()["data"][0]["chat"] is False
        refused = served.post(CHAT, messages=[user("a")])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")


def test_server_survives_a_failing_model(monkeypatch: pytest.MonkeyPatch):
    with serve() as served:
        for name in ("megatoken.inference.batch.KeyValueCache", "torch.Generator"):
            with monkeypatch.context() as context:
                context.setattr(name, lambda *_, **__: 1 / 0)
                for _ in range(2):
                    assert served.post(COMPLETIONS, prompt="a").status_code == 500
        assert served.engine.counts == (0, 0)
        hook = served.engine.model.norm.register_forward_hook(
            lambda _, __, hidden: hidden * torch.nan
        )
        plain = served.post(COMPLETIONS, prompt="a")
        streamed = served.post(COMPLETIONS, prompt="a", stream=True)
        hook.remove()
        assert plain.status_code == 500
        assert json.loads(streamed.text.removeprefix("data: ")) == plain.json()
        served.complete("a", max_tokens=2)
