"""The server by plain HTTP: what it answers, to whom, and what it refuses."""

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from megatoken.data.chat_template import Message, find_template
from megatoken.sampling.generate import generate_ids
from megatoken.serving import server as server_module
from megatoken.system.machine import allow_open_files
from tests.serving.served import (
    CHAT,
    COMPLETIONS,
    SIZES,
    Served,
    build_model,
    read_events,
    send_raw,
    serve,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as started:
        yield started


def complete(prompt: str, tokens: int, **options: Any) -> str:
    """What `generate_ids` alone gives."""
    model, tokenizer = build_model()
    ids = tokenizer.encode(prompt).tolist()
    return tokenizer.decode(
        generate_ids(model, ids, max_new_tokens=tokens, stop_ids=(tokenizer.eot,), **options)[0]
    )


def test_a_completion_is_what_generate_gives(served: Served) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    status, answer = served.ask(COMPLETIONS, {"prompt": "ab", "max_tokens": 20} | options)
    assert status == 200
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": complete("ab", 20, **options),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22}
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert served.ask(COMPLETIONS, {"prompt": [97, 98], "max_tokens": 20} | options)[1][
        "choices"
    ] == [choice]
    assert (
        served.ask(COMPLETIONS, {"prompt": "ab", "temperature": 0})[1]["usage"]["completion_tokens"]
        == 16
    )


def test_a_chat_goes_through_the_template(served: Served) -> None:
    messages = [("system", "be"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    rows = [{"role": role, "content": content} for role, content in messages]
    rows[3] = {"role": "user", "content": [{"type": "text", "text": "c"}]}  # type: ignore[dict-item]
    status, answer = served.ask(
        CHAT, {"messages": rows, "temperature": 0, "max_completion_tokens": 12}
    )
    assert status == 200
    model, tokenizer = build_model()
    template = find_template(tokenizer)
    ids, _ = template.encode([Message(*each) for each in messages], reply=True)
    [expected] = generate_ids(model, ids, max_new_tokens=12, temperature=0)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(expected)}
    assert choice["finish_reason"] == "length"
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(ids)
    left = served.ask(CHAT, {"messages": rows, "temperature": 0})[1]["usage"]["total_tokens"]
    assert left <= SIZES.seq_len


def test_the_stop_token_ends_an_answer_and_is_not_shown() -> None:
    model, tokenizer = build_model()
    template = find_template(tokenizer)
    with serve() as started:
        for seed in range(40):
            answer = started.chat("hello", seed=seed, temperature=2.0)[1]
            [choice], used = answer["choices"], answer["usage"]["completion_tokens"]
            ids, _ = template.encode([Message("user", "hello")], reply=True)
            room = SIZES.seq_len - len(ids)
            [free] = generate_ids(model, ids, max_new_tokens=room, temperature=2.0, seed=seed)
            ends = [i for i, id in enumerate(free) if id in template.stop_ids]
            kept = free[: ends[0]] if ends else free
            assert choice["finish_reason"] == ("stop" if ends else "length")
            assert used == len(kept) + bool(ends)
            assert choice["message"]["content"] == tokenizer.decode(kept)
            if ends:
                return
    pytest.fail("no answer stopped")


def test_a_stream_is_the_same_text_in_pieces(served: Served) -> None:
    options: dict[str, Any] = {"seed": 5, "max_tokens": 30, "temperature": 1.2}
    whole = served.chat("x", **options)[1]["choices"][0]
    status, content = served.chat(
        "x", stream=True, stream_options={"include_usage": True}, **options
    )
    assert status == 200
    first, *pieces, last, usage = read_events(content)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(each["choices"][0]["delta"]["content"] for each in pieces)
        == whole["message"]["content"]
    )
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == (
        {},
        whole["finish_reason"],
    )
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 30)
    assert len({each["id"] for each in (first, *pieces, last, usage)}) == 1
    assert {each["object"] for each in (first, *pieces, last, usage)} == {"chat.completion.chunk"}
    text = served.ask(COMPLETIONS, {"prompt": "x", "stream": True} | options)[1]
    assert "".join(each["choices"][0]["text"] for each in read_events(text)) == complete(
        "x", 30, seed=5, temperature=1.2
    )
    body = json.dumps({"model": "tiny", "prompt": "x", "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    old = send_raw(served.server.port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert old.endswith(b"data: [DONE]\n\n")
    assert b"chunked" not in old


def test_a_stop_text_cuts_the_answer_and_is_never_shown_in_part(served: Served) -> None:
    free = complete("q", 30, temperature=0)
    stop = free[11:14]
    expected = free[: free.index(stop)]
    body = {"prompt": "q", "max_tokens": 30, "temperature": 0, "stop": ["\0never", stop]}
    [choice] = served.ask(COMPLETIONS, body)[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    pieces = [
        each["choices"][0]
        for each in read_events(served.ask(COMPLETIONS, body | {"stream": True})[1])
    ]
    assert "".join(each["text"] for each in pieces) == expected
    assert pieces[-1]["finish_reason"] == "stop"
    held = served.ask(COMPLETIONS, body | {"stop": free[-2:] + "\0"})[1]["choices"][0]
    assert (held["text"], held["finish_reason"]) == (free, "length")


def test_the_oldest_turns_are_left_out_where_that_is_asked_for(served: Served) -> None:
    turns = [{"role": ("user", "assistant")[i % 2], "content": str(i) * 40} for i in range(5)]
    body = {"messages": turns, "temperature": 0, "max_tokens": 30, "truncation": "auto"}
    status, answer = served.ask(CHAT, body | {"truncation": "disabled"})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    kept = served.ask(CHAT, body | {"messages": turns[4:]})[1]
    assert served.ask(CHAT, body)[1]["choices"] == kept["choices"]
    connection = served.connect()
    for stream in (False, True):
        raw = json.dumps({"model": "tiny", "stream": stream} | body)
        connection.request("POST", CHAT, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.headers["Dropped-Messages"] == "4"
        response.read()
    connection.close()
    too_long = [{"role": "user", "content": "a" * 200}]
    assert (
        served.ask(CHAT, body | {"messages": too_long})[1]["error"]["code"]
        == "context_length_exceeded"
    )
    assert served.ask(CHAT, {"messages": turns[:1], "truncation": "auto", "seed": 1})[0] == 200


def test_eight_clients_at_once_get_the_text_they_get_alone(served: Served) -> None:
    def ask(number: int) -> Any:
        options = {
            "seed": number,
            "max_tokens": 20 + 9 * number,
            "temperature": (0.0, 0.8, 1.5)[number % 3],
        }
        status, content = served.chat(
            "hello " * (1 + number % 4), stream=bool(number % 2), **options
        )
        assert status == 200
        if number % 2:
            return "".join(
                each["choices"][0]["delta"].get("content", "") for each in read_events(content)
            )
        return content["choices"][0]["message"]["content"]

    alone = [ask(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == alone
    assert len(set(alone)) == 8


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_frees_its_row_and_its_place(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    with serve(rows=1, waiting=1) as started:
        hook = started.engine.model.norm.register_forward_hook(lambda *_: time.sleep(0.02))
        try:
            body = {
                "model": "tiny",
                "prompt": "a",
                "max_tokens": 150,
                "temperature": 0,
                "stream": stream,
            }
            connections = [started.connect() for _ in range(2)]
            for count, connection in enumerate(connections, start=1):
                connection.request(
                    "POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"}
                )
                wait_for(lambda count=count: sum(started.engine.counts) == count)
            assert started.engine.counts == (1, 1)
            status, refused = started.ask(COMPLETIONS, body)
            assert (status, refused["error"]["code"]) == (429, "queue_full")
            connections[1].close()
            assert started.ask(COMPLETIONS, body | {"max_tokens": 1})[0] in (200, 429)
            connections[0].close()
            wait_for(lambda: started.engine.counts == (0, 0))
            assert started.ask(COMPLETIONS, body | {"max_tokens": 1})[0] == 200
        finally:
            hook.remove()


def test_a_free_row_takes_a_request_where_none_may_wait() -> None:
    with serve(rows=1, waiting=0) as started:
        for _ in range(3):
            assert started.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200


def test_top_p_0_is_the_likeliest_alone(served: Served) -> None:
    greedy, narrow = (
        served.ask(COMPLETIONS, {"prompt": "q", "max_tokens": 30} | how)[1]["choices"][0]["text"]
        for how in ({"temperature": 0}, {"temperature": 2, "top_p": 0})
    )
    assert narrow == greedy == complete("q", 30, temperature=0)


def test_a_key_is_wanted_where_there_is_one() -> None:
    with serve(api_key="open-sesame") as started:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": "Bearer \xfc"}, 401),
            ({"Authorization": "Bearer open-sesame"}, 200),
        ):
            assert started.ask("/v1/models", headers=headers)[0] == status
            assert started.ask(COMPLETIONS, {"prompt": "a"}, headers=headers)[0] == status
        assert started.ask("/health")[0] == started.ask("/")[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example:8000"}, 403),
        ({"Host": "192.168.0.1"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:2"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_refused(
    served: Served, headers: dict[str, str], status: int
) -> None:
    for path, body in (
        ("/", None),
        ("/v1/models", None),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}),
    ):
        assert served.ask(path, body, headers=headers)[0] == status


def test_beyond_loopback_any_number_is_a_host() -> None:
    with serve(host="0.0.0.0", api_key="k") as started:
        for host, status in (("192.168.0.1:80", 200), ("evil.example", 403), ("localhost", 200)):
            assert started.ask("/health", headers={"Host": host})[0] == status


WRONG: list[tuple[str, Any, int, str]] = [
    (CHAT, {}, 400, "messages are missing"),
    (CHAT, {"messages": []}, 400, "a conversation is a list of messages"),
    (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "unknown role 'king'"),
    (CHAT, {"messages": [{"role": "user", "content": ""}]}, 400, "content is empty"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "a part of the content is not",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}] * 2},
        400,
        "two messages of the user in a row",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a"}] * 600},
        400,
        "600 messages, at most 512",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "a" * 200}]},
        400,
        "tokens do not fit the context of 160",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogate"),
    (CHAT, {"messages": [], "truncation": 1}, 400, "truncation is neither auto nor disabled"),
    (
        COMPLETIONS,
        {"model": "gpt-4", "prompt": "a"},
        404,
        "no model 'gpt-4' here: this server has 'tiny'",
    ),
    (COMPLETIONS, {"model": None, "prompt": "a"}, 404, "model is missing"),
    (COMPLETIONS, {}, 400, "the prompt is neither one text nor one list"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "the prompt is neither"),
    (COMPLETIONS, {"prompt": [1, 999]}, 400, "999 is none of 259 token ids"),
    (COMPLETIONS, {"prompt": "a" * 160}, 400, "160 tokens do not fit"),
    (COMPLETIONS, {"prompt": "\udfff"}, 400, "prompt holds half of a surrogate pair"),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 160},
        400,
        "max_tokens is 160, the context of 160 has room for 159",
    ),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0, not 1 or more"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens is no whole number"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, "max_tokens is no whole number"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature is -1, not 0 to 2"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature is no number"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, 400, "top_p is 1.1, not 0 to 1"),
    (COMPLETIONS, {"prompt": "a", "seed": 10**30}, 400, "seed is 1,000,000,000,000,000,00..., not"),
    (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 10**400},
        400,
        "max_tokens is 10,000,000,000,000,000,0..., the context",
    ),
    (
        COMPLETIONS,
        {"prompt": [10**400]},
        400,
        "10,000,000,000,000,000,0... is none of 259 token ids",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stop": ["a"] * 5},
        400,
        "stop is no text and no list of at most 4",
    ),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "a text of stop has 1 to 200 characters"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream is not of type bool"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream_options": {"include_usage": True}},
        400,
        "stream_options is",
    ),
    (COMPLETIONS, {"prompt": "a", "n": 2}, 400, "n is not supported"),
    (COMPLETIONS, {"prompt": "a", "n": True}, 400, "n is not supported"),
    (
        COMPLETIONS,
        {"prompt": "a", "n": 1, "user": "me", "presence_penalty": 0.0, "echo": False},
        200,
        "",
    ),
    (COMPLETIONS, {"prompt": "a", "logprobs": 3}, 400, "logprobs is not supported"),
    (COMPLETIONS, {"prompt": "a", "min_p": 0.1}, 400, "unknown parameter 'min_p'"),
    (CHAT, b"", 400, "the body is no JSON text"),
    (CHAT, b"[" * 100_000, 400, "the body is no JSON text"),
    (CHAT, b'{"model": NaN}', 400, "the body is no JSON text"),
    (CHAT, b'{"n": ' + b"9" * 5000 + b"}", 400, "the body is no JSON text"),
    (CHAT, b"\xff{}", 400, "the body is no JSON text"),
    (CHAT, b"[]", 400, "the body is no JSON object"),
    ("/v1/nothing", b"{}", 404, "nothing is here for POST"),
    (CHAT, None, 404, "nothing is here for GET"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), WRONG)
def test_wrong_requests_get_a_line_in_openai_s_form(
    served: Served, path: str, body: Any, status: int, message: str
) -> None:
    got, answer = served.ask(path, body)
    assert got == status
    if status != 200:
        assert answer["error"].keys() == {"message", "type", "param", "code"}
        assert message in answer["error"]["message"]
        assert "\n" not in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


def test_http_that_is_wrong(served: Served) -> None:
    begin = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    for raw, status in (
        (begin + b"\r\n", b"411"),
        (begin + b"Content-Length: -1\r\n\r\n", b"411"),
        (begin + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", b"411"),
        (begin + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (begin + b"Content-Length: 99999999\r\n\r\n", b"413"),
        (
            begin.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}",
            b"415",
        ),
        (b"GET / HTTP/1.1\r\n\r\n", b"403"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", b"403"),
        (b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"501"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
    ):
        answer = send_raw(served.server.port, raw, ends=True)
        assert answer.split(b" ", 2)[1] == status, raw[:60]
        assert answer.count(b"HTTP/1.1 ") == 1
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert send_raw(served.server.port, begin + b"Content-Length: 50\r\n\r\n{", ends=True) == b""


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (CHAT, {}, 413),
        (COMPLETIONS, {"Content-Type": "text/plain", "Content-Length": "3000000"}, 415),
        ("/v1/nothing", {}, 404),
        (CHAT, {"Authorization": "Bearer wrong"}, 401),
        (CHAT, {"Host": "evil.example"}, 403),
    ],
)
def test_a_client_that_is_still_sending_reads_why_it_is_refused(
    path: str, headers: dict[str, str], status: int
) -> None:
    body = b"x" * int(headers.get("Content-Length", 20 << 20))
    with serve(api_key="k") as started:
        got, answer = started.ask(path, body, headers={"Authorization": "Bearer k"} | headers)
        assert got == status
        assert answer["error"]["message"]
        assert started.ask("/health")[0] == 200


def test_a_client_that_sends_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "LINGER_SECONDS", 0.2)
    with (
        serve() as started,
        socket.create_connection(("127.0.0.1", started.server.port), timeout=60) as connection,
    ):
        connection.sendall(
            b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n"
        )
        assert connection.recv(12) == b"HTTP/1.1 404"
        end = time.monotonic() + 30
        with suppress(ConnectionError):
            while time.monotonic() < end:
                connection.sendall(b"x")
                time.sleep(0.01)
        assert time.monotonic() < end


def test_random_requests_never_break_the_server(served: Served) -> None:
    noise = random.Random(0)
    values = [
        None,
        True,
        0,
        -1,
        0.5,
        1e308,
        10**18,
        "",
        "a",
        "\ud83d",
        [],
        [0],
        ["a"],
        {},
        {"type": "text"},
        [[1]],
    ]
    names = [
        "messages",
        "prompt",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "n",
        "tools",
    ]
    names += [
        "stream",
        "stream_options",
        "response_format",
        "max_completion_tokens",
        "logit_bias",
        "unknown",
    ]
    statuses: set[int] = set()
    for _ in range(300):
        body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        path = noise.choice([CHAT, COMPLETIONS])
        if path == CHAT:
            body["messages"] = [
                {
                    noise.choice(["role", "content", "x"]): noise.choice(
                        ["user", "assistant", *values]
                    )
                    for _ in range(3)
                }
                for _ in range(noise.randrange(3))
            ]
            del body["prompt"]
        for name in noise.sample(names, noise.randrange(3)):
            body[name] = noise.choice(values)
        raw = json.dumps(body).encode()
        if noise.random() < 0.2:
            cut = noise.randrange(len(raw))
            raw = raw[:cut] + bytes([noise.randrange(256)]) + raw[cut + 1 :]
        status, answer = served.ask(path, raw)
        statuses.add(status)
        assert status in (200, 400, 404), (raw, answer)
    assert statuses == {200, 400, 404}
    assert served.ask("/health") == (200, {"status": "ok", "running": 0, "waiting": 0})


def test_models_health_and_one_connection_for_several_requests(served: Served) -> None:
    connection = served.connect()
    about = None
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/v1/models"):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["Cache-Control"] == "no-store"
        content = json.loads(response.read())
        about = content if path.endswith("tiny") else about
    assert content["data"] == [about]
    assert about is not None
    assert (about["id"], about["context"], about["chat"], about["owned_by"]) == (
        "tiny",
        160,
        True,
        "megatoken",
    )
    for _ in range(2):
        body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1, "stream": True})
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        assert read_events(connection.getresponse().read().decode())
    connection.close()


def test_a_model_without_a_template_continues_text_alone() -> None:
    with serve(chat=False) as started:
        assert started.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert started.ask("/v1/models")[1]["data"][0]["chat"] is False
        status, answer = started.chat("hello")
        assert (status, answer["error"]["code"]) == (400, "no_chat_template")
        assert "megatoken train sft" in answer["error"]["message"]


def test_a_connection_may_have_any_descriptor() -> None:
    allow_open_files(1100)
    with serve() as started, ExitStack() as files:
        for _ in range(1100):
            files.callback(os.close, os.dup(0))
        assert started.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_failure_of_the_model_is_said_and_the_next_request_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve() as started:
        with monkeypatch.context() as context:
            built = []
            context.setattr(
                "megatoken.sampling.batch.KeyValueCache", lambda *_, **__: built.append(1) or 1 / 0
            )
            assert [started.ask(COMPLETIONS, {"prompt": "a"})[0] for _ in range(2)] == [500, 500]
            assert len(built) == 2
        with monkeypatch.context() as context:
            context.setattr("torch.Generator", lambda: 1 / 0)  # as `add` begins a row
            assert started.ask(COMPLETIONS, {"prompt": "a"})[0] == 500
        assert started.engine.counts == (0, 0)
        hook = started.engine.model.norm.register_forward_hook(
            lambda _, __, hidden: hidden * float("nan")
        )
        for stream in (False, True):
            status, answer = started.ask(COMPLETIONS, {"prompt": "a", "stream": stream})
            assert (
                ("not finite" in answer["error"]["message"])
                if status == 500
                else "not finite" in answer
            )
        hook.remove()
        assert started.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200
