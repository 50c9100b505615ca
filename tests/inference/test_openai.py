"""What OpenAI's clients send and read: choices, log-probabilities, tools, many clients, metrics."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from megatoken.inference.batch import Token
from megatoken.inference.protocol import ChatRequest, ResponseBuilder, ServedModel
from megatoken.text.chat_template import ChatTemplate
from tests.inference.served import CHAT, COMPLETIONS, SIZES, Served, build_model, serve, user

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + ' ' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}"
    "{{ '<think></think>' if enable_thinking is false }}{% endif %}"
)
# What clients of vLLM and llama.cpp send, and the last of it is used.
NEUTRAL = json.loads("""{
    "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0,
    "ignore_eos": false, "use_beam_search": false, "skip_special_tokens": true,
    "modalities": ["text"], "continue_final_message": false, "add_generation_prompt": true,
    "chat_template_kwargs": {"enable_thinking": false}
}""")
TOOL = '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
TOOLS = [json.loads(TOOL)]
# Words of the bodies below.
WORDS = {
    "HI": '{"role": "user", "content": "Hi"}',
    "CALL": '{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}',
    "RESULT": '{"role": "tool", "tool_call_id": "c", "content": "3"}',
    "TOOL": TOOL,
}
ACCEPTED = """\
{"messages": [HI, HI]}
{"messages": [HI, {"role": "developer", "content": "Be brief."}, {"role": "user", "content": ""}]}
{"messages": [HI, {"role": "assistant", "content": ""}, HI]}
{"messages": [HI, {"role": "assistant", "content": null, "tool_calls": [CALL]}, RESULT], "tools": [TOOL]}
{"messages": [HI], "tools": [], "tool_choice": "none", "parallel_tool_calls": true}
{"messages": [HI], "max_tokens": 5, "max_completion_tokens": 5}
{"messages": [HI], "response_format": {"type": "text"}, "logit_bias": {}}
{"messages": [HI, {"role": "assistant", "content": null, "tool_calls": []}, HI]}
"""


def build_template() -> ChatTemplate:
    """Return a template that writes tools."""
    _, tokenizer = build_model()
    return ChatTemplate("tools", tokenizer, TEMPLATE)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(cache_tokens=40 * SIZES.seq_len, template=build_template()) as running:
        yield running


def test_accepted_requests(served: Served):
    for row in ACCEPTED.splitlines():
        body = re.sub("|".join(WORDS), lambda word: WORDS[word[0]], row)
        served.answer(CHAT, **{"max_tokens": 3} | json.loads(body))
    plain, neutral = (served.chat("Hi", max_tokens=1, **options) for options in ({}, NEUTRAL))
    n_more = neutral["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"]
    assert n_more == len("<think></think>")  # variables reach the template


def test_choices_and_prompts(served: Served):
    options = {"seed": 7, "max_tokens": 9}
    texts = [
        served.choose(prompt, **options | {"seed": seed})["text"]
        for prompt in ("ab", "q")
        for seed in (7, 8)
    ]
    answer = served.complete(["ab", [ord("q")]], n=2, **options)
    choices = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert choices == [*enumerate(texts)]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 36)
    streamed = [""] * 4
    options["stop"] = texts[1][4]
    for event in served.stream(COMPLETIONS, prompt=["ab", "q"], n=2, **options):
        [choice] = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == [text.partition(options["stop"])[0] for text in texts]


def test_log_probabilities(served: Served):
    model, tokenizer = build_model()
    options = {"max_tokens": 6, "temperature": 0}
    choice = served.choose("ab", logprobs=2, **options)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    ids = tokenizer.encode("ab" + choice["text"]).tolist()
    with torch.inference_mode():
        rows = model.logits(torch.tensor([ids]))[0, 1:-1].log_softmax(-1)
    expected = rows[range(6), ids[2:]].tolist()
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-4)
    best = [[*top.values()] for top in logprobs["top_logprobs"]]
    assert np.array(best) == pytest.approx(rows.topk(2).values.numpy(), abs=1e-4)
    [choice] = served.chat("x", logprobs=True, top_logprobs=1, **options)["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    chosen = [entry["logprob"] for entry in content]
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == chosen
    events = served.stream(CHAT, messages=[user("x")], logprobs=True, **options)
    streamed = [event["choices"][0]["logprobs"]["content"][0]["logprob"] for event in events]
    assert streamed == pytest.approx(chosen, abs=1e-4)


def test_usage_counts_what_is_reused_of_the_first_turn():
    options = {"temperature": 0, "max_tokens": 9}
    with serve() as served:
        first = served.chat("abc", **options)
        turn = [user("abc"), first["choices"][0]["message"], user("d")]
        second = served.answer(CHAT, messages=turn, **options)
    n_first = first["usage"]["prompt_tokens"] + 8  # the last token is not fed to the model
    for answer, count in ((first, 0), (second, n_first)):
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": count}


def answer_with(text: str, **body: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return why an answer `text` ends, its message, and the message of its streamed deltas."""
    _, tokenizer = build_model()
    served = ServedModel("tiny", SIZES.seq_len, tokenizer, build_template())
    request = ChatRequest(model="tiny", messages=[user("Hi")], **body)
    requests, _ = request.encode(served)
    full, streamed = (ResponseBuilder(request, requests, served) for _ in range(2))
    joined = {}
    control = tokenizer.special_ids["<|im_start|>"]  # is not shown
    for id in (*tokenizer.encode(text).tolist(), control, tokenizer.eot):
        token = Token(0, id, "stop" if id == tokenizer.eot else None, None)
        for builder in (full, streamed):
            builder.choices[0].push(token)
        [event] = streamed.build_event(*streamed.choices)["choices"]
        for name, value in event["delta"].items():
            joined[name] = joined[name] + value if name in joined else value
    [choice] = full.build_full()["choices"]
    assert event["finish_reason"] == choice["finish_reason"]
    return choice["finish_reason"], choice["message"], joined


def test_thinking_and_tool_calls():
    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nfirst <b\n</think>\n\nLet me.\n{calls}\n{calls}"
    reason, message, streamed = answer_with(text, tools=TOOLS)
    assert (reason, message["content"]) == ("tool_calls", "Let me.")
    assert message["reasoning_content"] == streamed["reasoning_content"] == "first <b\n"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert [call["index"] for call in streamed["tool_calls"]] == [0, 1]
    assert answer_with(calls, tools=TOOLS)[1]["content"] == ""
    for plain, body in (
        (calls, {}),
        (calls, {"tools": TOOLS, "tool_choice": "none"}),
        ("<tool_call>add</tool_call>", {"tools": TOOLS}),
        ("a <tool_cal", {"tools": TOOLS}),
    ):
        expected = {"role": "assistant", "content": plain}
        assert answer_with(plain, **body) == ("stop", expected, expected)


def test_64_clients_get_the_texts_they_get_alone():
    def ask(number):
        options = {"seed": number, "max_tokens": 12 + number % 9, "temperature": number % 3 / 2}
        return served.choose(f"{number} " * (1 + number % 4), **options)["text"]

    with serve(cache_tokens=2 * SIZES.seq_len) as served:
        with ThreadPoolExecutor(64) as pool:
            texts = list(pool.map(ask, range(64)))
        assert served.engine.counts == (0, 0)
        assert [ask(number) for number in range(0, 64, 7)] == texts[::7]
        assert len(set(texts)) == 64


def test_metrics(served: Served):
    def read():
        lines = served.client.get("/metrics").text.splitlines()
        rows = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name.removeprefix("megatoken_"): float(value) for name, value in rows}

    before = read()
    served.complete("hello", seed=1, max_tokens=5)
    served.post(COMPLETIONS, prompt="a", n=0)
    after = read()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change['requests_total{status="200"}'] == change['requests_total{status="400"}'] == 1
    assert change["prompt_tokens_total"] == change["generation_tokens_total"] == 5
    assert change["time_to_first_token_seconds_count"] == 1
    assert 0 < after["cache_tokens"] <= after["cache_tokens_bound"] == 40 * SIZES.seq_len


def test_official_client(served: Served):
    openai = pytest.importorskip("openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    options = {"model": "tiny", "messages": [user("Hi")], "tools": TOOLS}
    options |= {"seed": 1, "max_tokens": 8}
    refused = {"response_format": {"type": "json_object"}}
    refused |= {"reasoning_effort": "low", "min_p": 0.1, "skip_special_tokens": False}
    with openai.OpenAI(base_url=url, api_key="none") as client:
        create = client.chat.completions.create
        answer = create(n=2, logprobs=True, **options)
        assert [len(choice.logprobs.content) for choice in answer.choices] == [8, 8]
        assert answer.usage.prompt_tokens_details.cached_tokens >= 0
        events = list(create(stream=True, stream_options={"include_usage": True}, **options))
        text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
        assert text == answer.choices[0].message.content
        assert events[-1].usage.completion_tokens == 8
        for name, value in refused.items():
            with pytest.raises(openai.BadRequestError) as error:
                create(extra_body={name: value}, **options)
            assert (error.value.param, error.value.code) == (name, "unsupported_parameter")
