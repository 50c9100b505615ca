"""Templates in the styles of chat models give transformers' ids and masks, for any content."""

import json
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatoken.data.chat_dataset import open_rows
from megatoken.data.chat_template import (
    CHATML,
    ChatTemplate,
    Message,
    find_template,
    parse_messages,
)
from megatoken.data.dataset import load_dataset
from megatoken.data.prepare_chats import prepare_chats
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import DataError

PROSE = (
    "The cat sat on the mat; it didn't purr. user assistant\n\nIl était une fois 12 chats.  " * 40
)

# [[ and ]] enclose what the assistant writes: {% generation %} tags, or nothing.
DEFAULT_SYSTEM = """
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content + '<|im_end|>' }}]]{{- '\n' }}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"""
TOOLS = """
{%- set first = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
    {{- '\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}[[
        {{- m.content }}
        {%- for call in m.tool_calls %}
            {%- if m.content or not loop.first %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]{{- '\n' }}
    {%- elif m.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif not (loop.first and m.role == 'system') %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set thoughts = m.reasoning_content or '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}[[
        {%- if loop.index0 > ns.last %}{{- '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}
        {{- content + '<|im_end|>' }}]]{{- '\n' }}
    {%- else %}{{- content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
TURNS = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- raise_exception('no system') }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content | trim + '<end_of_turn>' }}]]{{- '\n' }}
    {%- else %}{{- m.content | trim + '<end_of_turn>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}"""
INSTRUCTIONS = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}[[{{- ' ' + m.content + eos_token }}]]
    {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
HEADERS = """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%Y') + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content | trim + '<|eot_id|>' }}]]
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
PLAIN = """
{%- for m in messages %}
    {{- '### ' + m.role + ':\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content + eos_token }}]]{{- '\n' }}{% else %}{{- m.content + '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\n### assistant:\n' }}{% endif %}"""
AGENT = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set thoughts = m.thinking if loop.index0 > ns.last else '' %}
        {{- '<|im_start|>assistant\n' + ('<think>\n' if thoughts else '') }}[[
        {%- if thoughts %}{{- thoughts + '\n</think>\n\n' }}{% endif %}
        {{- m.content }}
        {%- for call in m.tool_calls %}
            {{- '\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]{{- '\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
CALL_ENDS_OTHERWISE = """
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content }}
        {%- for call in m.tool_calls %}{{- call.function.arguments | tojson }}{% endfor %}
        {{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}]]
    {%- else %}{{- m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
LAST_ENDS_OTHERWISE = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant' }}[[
        {%- if m.thinking and loop.last %}
            {{- ' to=self<|message|>' + m.thinking + '<|im_end|><|im_start|>assistant' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {{- ' to=add<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|eom_id|>' }}
        {%- else %}
            {{- ' to=user<|message|>' + m.content + ('<|eot_id|>' if loop.last else '<|im_end|>') }}
        {%- endif %}]]
    {%- else %}{{- '<|im_start|>' + m.role + '<|message|>' + m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}"""
PARTS = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '<|message|>' }}
    {%- if m.role == 'assistant' %}[[
        {{- 'think<|message|>' + m.thinking | default('') + '<|eom_id|>' }}
        {{- 'response<|message|>' + m.content + '<|eom_id|>' }}
        {%- for call in m.tool_calls %}
            {{- 'call<|message|>' + call.function.arguments | tojson + '<|eom_id|>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]
    {%- else %}{{- m.content + '<|eom_id|><|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|message|>' }}{% endif %}"""
TEMPLATES = {
    "default-system": DEFAULT_SYSTEM,
    "tools": TOOLS,
    "thinking": THINKING,
    "turns": TURNS,
    "instructions": INSTRUCTIONS,
    "headers": HEADERS,
    "plain": PLAIN,
    "agent": AGENT,
    "call-ends-otherwise": CALL_ENDS_OTHERWISE,
    "last-ends-otherwise": LAST_ENDS_OTHERWISE,
    "parts": PARTS,
}
WITH_TOOLS = ("tools", "agent", "call-ends-otherwise", "last-ends-otherwise", "parts")
WITH_REASONING = ("thinking", "agent", "last-ends-otherwise", "parts")
CONTROL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]"),
    *("[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    "<|message|>",
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"q": "<é> & 'x'"}}}


def byte_level() -> tokenizers.Tokenizer:
    base = load_tokenizer("bpe:400", lambda: iter([PROSE]))
    return tokenizers.Tokenizer.from_str(base.to_json())


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer in SentencePiece's style, with a space before the first word of a text."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    bytes_as_text = [f"<0x{byte:02X}>" for byte in range(256)]
    special = ["<unk>", "<|endoftext|>", *bytes_as_text]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    inner.train_from_iterator([PROSE], trainer)
    content = json.loads(inner.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@cache
def open_template(name: str, *, tagged: bool, make: Any = byte_level) -> tuple[ChatTemplate, Any]:
    """Return megatoken's template and transformers' tokenizer of the same folder."""
    transformers = pytest.importorskip("transformers")
    inner = make()
    inner.add_special_tokens(list(CONTROL))
    inner.add_tokens(list(TAGS))
    tags = ("{%- generation %}", "{%- endgeneration %}") if tagged else ("", "")
    jinja = TEMPLATES[name].replace("[[", tags[0]).replace("]]", tags[1])
    end = {"instructions": "</s>", "plain": "<|endoftext|>"}.get(name, "<|im_end|>")
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": end}
    with TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": jinja})
        )
        oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        return find_template(load_tokenizer(folder)), oracle


WORDS = st.sampled_from(
    (" ", "\n", "cat", "the ", "été", "🙂", "user", "\t", "<", "|>", "'", "{{", *TAGS)
)
TEXT = st.lists(WORDS | st.text(max_size=5), max_size=8).map("".join)
SPELLED = st.lists(
    WORDS | st.text(max_size=3) | st.sampled_from((*CONTROL, "<s", "[INST", "<|im_")), max_size=8
).map("".join)


def is_plain(text: str) -> bool:
    return not any(token in text for token in (*CONTROL, "<|endoftext|>"))


@st.composite
def conversations(draw: st.DrawFn, name: str, texts: st.SearchStrategy[str]) -> list[Message]:
    """Draw turns of user and assistant; with system, tool calls and reasoning if supported."""
    messages = []
    if name != "turns" and draw(st.booleans()):
        messages.append(Message("system", draw(texts)))
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message("user", draw(texts)))
        fields = {}
        if name in WITH_REASONING and draw(st.booleans()):
            thoughts = draw(texts)
            fields = {"thinking": thoughts, "reasoning_content": thoughts}
        while name in WITH_TOOLS and draw(st.booleans()):
            arguments = draw(st.sampled_from(({"a": draw(texts), "b": [1, None]}, {"c": 2}, {})))
            calls = [{"type": "function", "function": {"name": "add", "arguments": arguments}}]
            calling = {**fields, "tool_calls": calls * 2}
            messages.append(Message("assistant", draw(st.just("") | texts), 1, calling))
            messages += [Message("tool", draw(texts), 1, {"name": "add"})] * 2
        messages.append(Message("assistant", draw(texts), 1, fields))
    return messages


def to_rows(messages: list[Message]) -> list[dict[str, Any]]:
    return [{**m.fields, "role": m.role, "content": m.content} for m in messages]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [byte_level, metaspace])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_ids_and_masks_equal_transformers(name: str, make: Any, data: st.DataObject):
    """The same masks come from {% generation %} tags and, without them, from prompts."""
    messages = data.draw(conversations(name, TEXT.filter(is_plain)))
    tools = [TOOL] if name == "tools" and data.draw(st.booleans()) else None
    tagged, oracle = open_template(name, tagged=True, make=make)
    untagged, _ = open_template(name, tagged=False, make=make)
    expected = oracle.apply_chat_template(
        to_rows(messages), tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    masks = [bool(mark) for mark in expected["assistant_masks"]]
    for template in (tagged, untagged):
        assert template.encode(messages, tools=tools) == (expected["input_ids"], masks)
    prompt = oracle.apply_chat_template(
        to_rows(messages[:-1]), tools=tools, add_generation_prompt=True, return_dict=False
    )
    assert untagged.encode(messages[:-1], reply=True, tools=tools)[0] == prompt


def make_harmless(value: Any) -> Any:
    """Replace all texts with another, but not where there is none."""
    if isinstance(value, dict):
        return {key: make_harmless(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(make_harmless, value))
    return "x" if isinstance(value, str) and value else value


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_control_token_comes_from_a_message(name: str, data: st.DataObject):
    """The control tokens are the template's, and the text is that of transformers."""
    template, oracle = open_template(name, tagged=False)
    messages = data.draw(conversations(name, SPELLED))
    ids, trained = template.encode(messages)
    special = set(template.tokenizer.special_ids.values())
    harmless = [Message(m.role, "x", m.weight, make_harmless(m.fields)) for m in messages]
    expected = zip(*template.encode(harmless), strict=True)
    found = zip(ids, trained, strict=True)
    assert [pair for pair in found if pair[0] in special] == [
        pair for pair in expected if pair[0] in special
    ]
    assert template.tokenizer.decode(ids) == oracle.apply_chat_template(
        to_rows(messages), tokenize=False
    )


def decode_trained(template: ChatTemplate, messages: list[Message], **options: Any) -> str:
    ids, trained = template.encode(messages, **options)
    return template.tokenizer.decode([id for id, mark in zip(ids, trained, strict=True) if mark])


@pytest.mark.parametrize("tagged", [True, False])
def test_only_answers_with_weight_are_trained(tagged: bool):
    template, _ = open_template("tools", tagged=tagged)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}}
    rows = [
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        *({"role": "tool", "content": "4"}, {"role": "assistant", "content": "5", "weight": 0}),
        *({"role": "user", "content": "no"}, {"role": "assistant", "content": "4"}),
    ]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call><|im_end|>'
    text = decode_trained(template, parse_messages(rows, "f:1"), tools=[TOOL])
    assert text == f"hi<|im_end|>{called}4<|im_end|>"


def test_reasoning_is_trained_where_the_template_keeps_it():
    template, _ = open_template("thinking", tagged=False)
    rows = [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"},
        {"role": "user", "content": "3+3"},
        {"role": "assistant", "content": "6", "reasoning": "add"},
    ]
    text = decode_trained(template, parse_messages(rows, "f:1"))
    assert text == "4<|im_end|><think>\nadd\n</think>\n\n6<|im_end|>"


# Names of reasoning; the template reads some, and transformers (5.24) fills in the others.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@pytest.mark.parametrize("given", THOUGHTS)
@pytest.mark.parametrize("read", THOUGHTS[:2])
def test_reasoning_and_variables_reach_the_template(read: str, given: str):
    template, oracle = open_template("thinking", tagged=False)
    jinja = THINKING.replace("m.reasoning_content", f"m.{read}").replace("[[", "").replace("]]", "")
    jinja = "{% if enable_thinking is false %}<think></think>{% endif %}" + jinja
    own = ChatTemplate("own", template.tokenizer, jinja)
    rows = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4", given: "add"}]
    for variables in ({}, {"enable_thinking": False}):
        ids, _ = own.encode(parse_messages(rows, "f:1"), variables=variables)
        assert "add" in own.tokenizer.decode(ids)
        assert ids == oracle.apply_chat_template(
            rows, chat_template=jinja, return_dict=False, **variables
        )


QUESTION = {"role": "user", "content": "Q"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "x"}}}
CALLING = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "R"},
    {"role": "assistant", "content": "A"},
]
END_COMES_LATE = """
{%- for m in messages %}
    {{- '<|im_start|>' if m.role == 'user' else '[INST]' if m.role == 'tool' else '[/INST]' }}
    {{- m.content }}{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[/INST]' }}{% endif %}"""
RESULT_IS_INSIDE = """
{%- for m in messages if m.role != 'tool' %}
    {{- '<|im_start|>' + m.role }}
    {%- for call in m.tool_calls %}
        {{- call.function.arguments | tojson + '<|eom_id|>' }}
        {%- for m in messages if m.role == 'tool' %}{{- m.content + '<|eot_id|>' }}{% endfor %}
    {%- endfor %}
    {{- m.content + ('<|im_end|>' if m.content else '') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}"""
CALL_IS_LEFT_OUT = "{# tool_calls #}" + DEFAULT_SYSTEM.replace("[[", "").replace("]]", "")


def open_jinja(jinja: str, special: tuple[str, ...] = CONTROL) -> ChatTemplate:
    inner = byte_level()
    inner.add_special_tokens(list(special))
    inner.add_tokens([token for token in CONTROL if token not in special])
    return ChatTemplate("own", Tokenizer(inner, "own", inner.token_to_id("<|endoftext|>")), jinja)


def test_an_end_that_comes_with_the_next_message_is_appended():
    """As in trl's training template of GLM, whose answers end so."""
    template = open_jinja(END_COMES_LATE)
    later = [QUESTION, {"role": "assistant", "content": "B"}]
    for rows, text, trained in (
        (CALLING[:2], '<|im_start|>Q[/INST]{"a": "x"}[INST]', '{"a": "x"}[INST]'),
        (CALLING[::3], "<|im_start|>Q[/INST]A<|im_start|>", "A<|im_start|>"),
        (
            CALLING + later,
            '<|im_start|>Q[/INST]{"a": "x"}[INST]R[/INST]A<|im_start|>Q[/INST]B<|im_start|>',
            '{"a": "x"}[INST]A<|im_start|>B<|im_start|>',
        ),
    ):
        messages = parse_messages(rows, "f:1")
        assert template.tokenizer.decode(template.encode(messages)[0]) == text
        assert decode_trained(template, messages) == trained
    stops = template.tokenizer.decode(template.stop_ids)
    assert stops == "<|im_start|><|endoftext|>[INST]"
    prompt = parse_messages(CALLING[:3], "f:1", reply=True)
    assert template.tokenizer.decode(template.encode(prompt, reply=True)[0]).endswith("R[/INST]")


def test_an_answer_that_is_not_found_in_one_piece_is_refused():
    """A result between a call and the text after it, and a call that the template leaves out."""
    inside, left_out = open_jinja(RESULT_IS_INSIDE), open_jinja(CALL_IS_LEFT_OUT)
    assert (
        decode_trained(inside, parse_messages(CALLING, "f:1")) == '{"a": "x"}<|eom_id|>A<|im_end|>'
    )
    talking = parse_messages([QUESTION, {**CALLING[1], "content": "T"}, *CALLING[2:]], "f:1")
    for template, messages in ((inside, talking), (left_out, parse_messages(CALLING, "f:1"))):
        with pytest.raises(DataError, match="f:9"):
            template.encode(messages, where="f:9")
        context = [replace(m, weight=int(m.content == "A")) for m in messages]
        if template is left_out:
            assert decode_trained(template, context) == "A<|im_end|>"


def test_an_end_need_not_be_a_special_token():
    template = open_jinja(CALL_IS_LEFT_OUT, special=())
    end = template.tokenizer.encode("<|im_end|>").tolist()
    assert (len(end), template.stop_ids[0]) == (1, end[0])
    assert decode_trained(template, parse_messages(CALLING[::3], "f:1")) == "A<|im_end|>"


def test_what_a_template_does_not_render_is_refused():
    turns, _ = open_template("turns", tagged=False)
    user = Message("user", "a")
    with pytest.raises(DataError, match="alternate"):
        turns.encode([user, user])
    call = Message("assistant", "", 1, {"tool_calls": [TOOL]})
    for messages, tools in (([user], [TOOL]), ([user, call], None)):
        with pytest.raises(DataError):
            turns.encode(messages, tools=tools)


def test_a_developers_message_is_the_systems_unless_the_template_has_it():
    template, _ = open_template("tools", tagged=False)
    ids = [
        template.encode([Message(role, "a"), Message("user", "b")])[0]
        for role in ("system", "developer")
    ]
    assert ids[0] == ids[1]


TEXT_OF_TURN = "{% for m in messages %}<s>{{ m.content }}</s>\r\n{% endfor %}"
TOOLS_OF_TURN = "{{ tools | length }}" + TEXT_OF_TURN
NAMED = [
    {"name": "default", "template": TEXT_OF_TURN},
    {"name": "tool_use", "template": TOOLS_OF_TURN},
]
PLACES: dict[str, dict[str, Any]] = {
    "text": {"tokenizer_config.json": {"chat_template": TEXT_OF_TURN}},
    "list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "json": {"chat_template.json": {"chat_template": TEXT_OF_TURN}},
    "jinja": {"tokenizer_config.json": {"chat_template": "{"}, "chat_template.jinja": TEXT_OF_TURN},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_found_and_saved_unchanged(tmp_path: Path, place: str):
    inner = byte_level()
    inner.add_special_tokens(["<s>", "</s>", *CHATML])
    inner.save(f"{tmp_path}/tokenizer.json")
    files = {
        name: content if isinstance(content, str) else json.dumps(content, indent=3)
        for name, content in PLACES[place].items()
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    tokenizer = load_tokenizer(str(tmp_path))
    template = find_template(tokenizer)
    assert template.jinja == TEXT_OF_TURN
    ids, _ = template.encode([Message("user", "a")])
    assert tokenizer.decode(ids) == "<s>a</s>\n"
    if place == "list":
        ids, _ = template.encode([Message("user", "a")], tools=[TOOL])
        assert tokenizer.decode(ids) == "1<s>a</s>\n"
    tokenizer.save(tmp_path / "saved")
    assert {name: (tmp_path / "saved" / name).read_bytes().decode() for name in files} == files
    again = find_template(load_tokenizer(f"{tmp_path}/saved"))
    assert (again.name, again.stop_ids) == (template.name, template.stop_ids)


def test_rows_with_tools_are_prepared(tmp_path: Path):
    template, _ = open_template("tools", tagged=False)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": messages, "tools": tools} for tools in (None, [TOOL], json.dumps([TOOL]))]

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = find_source(f"{tmp_path}/rows.jsonl")
    prepare_chats(source, tmp_path / "out", template.tokenizer, seq_len=999, val_fraction=0)
    ids, marks = open_rows(load_dataset(tmp_path / "out"), "train").sequence(0)
    expected = [
        template.encode(parse_messages(messages, ""), tools=tools)
        for tools in (None, [TOOL], [TOOL])
    ]
    assert ids == list(chain(*(each for each, _ in expected)))
    assert marks == list(chain(*(each for _, each in expected)))
