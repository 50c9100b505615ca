"""Chat templates: transformers' ids and masks, and no control token from a message."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from megatoken.base.errors import ConfigError, DataError
from megatoken.data.dataset import load_dataset
from megatoken.text.chat_dataset import open_rows
from megatoken.text.chat_template import (
    BUILT_IN,
    CHATML,
    THOUGHTS,
    ChatTemplate,
    Message,
    add_control_tokens,
    drop_generation_tags,
    find_template,
    parse_messages,
    template_of,
)
from megatoken.text.prepare_chats import prepare_chats
from megatoken.text.sources import find_source
from megatoken.text.tokenizer import Tokenizer, load_tokenizer

PROSE = (
    "The cat sat on the mat; it didn't purr. user assistant\n\nIl était une fois 12 chats.  " * 40
)

# [[ and ]] enclose what the assistant writes: {% generation %} tags, or nothing.
TEMPLATES = {
    "default-system": """
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{- '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content + '<|im_end|>' }}]]{{- '\n' }}
    {%- else %}{{- m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}""",
    "tools": """
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
    "thinking": """
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}""",
    "turns": """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- raise_exception('no system') }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content | trim + '<end_of_turn>' }}]]{{- '\n' }}
    {%- else %}{{- m.content | trim + '<end_of_turn>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}""",
    "instructions": """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- elif m.role == 'assistant' %}[[{{- ' ' + m.content + eos_token }}]]
    {%- else %}{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}""",
    "headers": """
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%Y') + '<|eot_id|>' }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content | trim + '<|eot_id|>' }}]]
    {%- else %}{{- m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "system-first": """
{{- bos_token }}
{%- for m in messages if m.role == 'system' %}{{- m.content + '\n' }}{% endfor %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'assistant' %}{{- '[/INST]' }}[[{{- m.content + eos_token }}]]
    {%- else %}{{- '[INST]' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[/INST]' }}{% endif %}""",
    "plain": """
{%- for m in messages %}
    {{- '### ' + m.role + ':\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content + eos_token }}]]{{- '\n' }}{% else %}{{- m.content + '\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '\n### assistant:\n' }}{% endif %}""",
    "agent": """
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{% endif %}""",
    "call-ends-otherwise": """
{%- for m in messages %}
    {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\n\n' }}
    {%- if m.role == 'assistant' %}[[{{- m.content }}
        {%- for call in m.tool_calls %}{{- call.function.arguments | tojson }}{% endfor %}
        {{- '<|eom_id|>' if m.tool_calls else '<|eot_id|>' }}]]
    {%- else %}{{- m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "last-ends-otherwise": """
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}""",
    "parts": """
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
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|message|>' }}{% endif %}""",
}
WITH_TOOLS = ("tools", "agent", "call-ends-otherwise", "last-ends-otherwise", "parts")
WITH_REASONING = ("thinking", "agent", "last-ends-otherwise", "parts")
CONTROL_LIST = """<s> </s> <|im_start|> <|im_end|> <start_of_turn> <end_of_turn> [INST] [/INST]
<|message|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|>"""
CONTROL = CONTROL_LIST.split()
TAG_LIST = "<think> </think> <tool_call> </tool_call>"
TAGS = TAG_LIST.split()  # added tokens that are not special
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"q": "<é> & 'x'"}}}
QUESTION = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "x"}}}
CALLING = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "R"},
    ANSWER,
]


BYTE_LEVEL = load_tokenizer("bpe:400", lambda: iter([PROSE])).to_json()


def byte_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(BYTE_LEVEL)


def metaspace() -> tokenizers.Tokenizer:
    """A tokenizer in SentencePiece's style, with a space before the first word of a text."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<|endoftext|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    inner.train_from_iterator([PROSE], trainer)
    content = json.loads(inner.to_str())
    content["added_tokens"] = content["added_tokens"][:2]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


@cache
def open_template(name: str, make: Any = byte_level) -> tuple[ChatTemplate, ChatTemplate, Any]:
    """Return a template with and without {% generation %} tags, and transformers' tokenizer."""
    transformers = pytest.importorskip("transformers")
    inner = make()
    inner.add_special_tokens(["<s>", *BUILT_IN[name][0]] if name in BUILT_IN else CONTROL)
    inner.add_tokens(TAGS)
    if name == "llama-3":  # which puts begin-of-text before every text
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
        )
    end = {"instructions": "</s>", "plain": "<|endoftext|>"}.get(name, "<|im_end|>")
    config = {"bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": end}
    if name in TEMPLATES:
        jinja = TEMPLATES[name].replace("[[", "{%- generation %}")
        config["chat_template"] = jinja.replace("]]", "{%- endgeneration %}")
    with TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config))
        oracle = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        tagged = find_template(load_tokenizer(folder))
    jinja = drop_tags(TEMPLATES[name]) if name in TEMPLATES else drop_generation_tags(tagged)
    oracle.chat_template = tagged.jinja
    return tagged, ChatTemplate("own", tagged.tokenizer, jinja), oracle


def drop_tags(jinja: str) -> str:
    return jinja.replace("[[", "").replace("]]", "")


WORD_LIST = " ,\n,cat,the ,été,🙂,user,\t,<,|>,',{{,日本,12,\ue000\ue001\ue002"
WORDS = [*WORD_LIST.split(","), *TAGS]
SPELLED = [*WORDS, *CONTROL, *(token[:-1] for token in CONTROL), "{% endfor %}", "{{ bos_token }}"]


def draw_conversation(draw: random.Random, name: str, words: list[str]) -> list[Message]:
    """Draw turns of user and assistant; with system, tool calls and reasoning if supported."""
    messages = []

    def text():
        characters = map(chr, draw.sample(range(0x3100), 9))
        return "".join(draw.choices([*words, *characters], k=draw.randrange(9)))

    def add(role, fields=None):
        messages.append(Message(role, text(), 1, fields or {}))

    def add_system(role, one_in):
        if name != "turns" and not draw.randrange(one_in):
            add(role)

    add_system(draw.choice(("system", "developer")), 2)
    for _ in range(draw.randint(1, 3)):
        add("user")
        add_system("system", 4)
        fields = {}
        if name in WITH_REASONING and draw.randrange(2):
            fields = dict.fromkeys(("thinking", "reasoning_content"), text())
        while name in WITH_TOOLS and draw.randrange(2):
            arguments = draw.choice(({"a": text(), "b": [1, None]}, {"c": 2}, {}))
            call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
            calls = {**fields, "tool_calls": [call] * 2}
            messages.append(Message("assistant", text() * draw.randrange(2), 1, calls))
            for _ in range(2):
                add("tool", {"name": "add"})
        add("assistant", fields)
        add_system("system", 4)
    return messages


def to_rows(messages: list[Message]) -> list[dict[str, Any]]:
    """Return rows in which a developer's message is the system's."""
    roles = {"developer": "system"}
    return [{**m.fields, "role": roles.get(m.role, m.role), "content": m.content} for m in messages]


NAMES = [*TEMPLATES, *BUILT_IN]


@pytest.mark.parametrize(("make", "count"), [(byte_level, 15), (metaspace, 6)])
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_masks_equal_transformers(name: str, make: Any, count: int):
    """The same masks come from {% generation %} tags and, without them, from prompts."""
    draw = random.Random(name)
    tagged, untagged, oracle = open_template(name, make)
    for _ in range(count):
        messages = draw_conversation(draw, name, WORDS)
        tools = [TOOL] if name == "tools" and draw.randrange(2) else None
        rows, options = to_rows(messages), {"tools": tools, "return_dict": True}
        expected = oracle.apply_chat_template(rows, return_assistant_tokens_mask=True, **options)
        masks = [bool(mark) for mark in expected["assistant_masks"]]
        for template in (tagged, untagged):
            assert template.encode(messages, tools=tools) == (expected["input_ids"], masks)
        prompt = oracle.apply_chat_template(rows[:-1], add_generation_prompt=True, **options)
        ids, _ = untagged.encode(messages[:-1], reply=True, tools=tools)
        assert ids == prompt["input_ids"]


def make_harmless(value: Any) -> Any:
    """Replace all texts with another, but not where there is none."""
    if isinstance(value, dict):
        return {key: make_harmless(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(make_harmless, value))
    return "x" if isinstance(value, str) and value else value


@pytest.mark.parametrize("name", NAMES)
def test_no_control_token_comes_from_a_message(name: str):
    """The control tokens are the template's, and the text is that of transformers."""
    _, template, oracle = open_template(name)
    special = set(template.tokenizer.special_ids.values())
    draw = random.Random(name)

    def list_control(messages):
        pairs = zip(*template.encode(messages), strict=True)
        return [pair for pair in pairs if pair[0] in special]

    for _ in range(30):
        messages = draw_conversation(draw, name, SPELLED)
        harmless = [replace(m, content="x", fields=make_harmless(m.fields)) for m in messages]
        assert list_control(messages) == list_control(harmless)
        text = oracle.apply_chat_template(to_rows(messages), tokenize=False)
        assert template.tokenizer.decode(template.encode(messages)[0]) == text


def decode_trained(template: ChatTemplate, messages: list[Message], **options: Any) -> str:
    ids, trained = template.encode(messages, **options)
    return template.tokenizer.decode([id for id, mark in zip(ids, trained, strict=True) if mark])


BUILT_IN_TEXTS = {
    "chatml": "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n",
    "llama-3": "<s><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>",
    "nanochat": "<|user_start|>Q<|user_end|><|assistant_start|>A<|assistant_end|>",
}


@pytest.mark.parametrize("name", BUILT_IN_TEXTS)
def test_built_in_templates_as_they_are_published(name: str):
    template, *_ = open_template(name)
    ids, _ = template.encode(parse_messages([QUESTION, ANSWER], ""))
    assert template.tokenizer.decode(ids) == BUILT_IN_TEXTS[name]
    end = template.tokenizer.special_ids[BUILT_IN[name][0][-1]]
    assert template.stop_ids[:2] == (end, template.tokenizer.eot)


def test_control_tokens_follow_the_last_id():
    plain = load_tokenizer("bytes")
    chat = add_control_tokens(plain)
    assert chat.special_ids == {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}
    assert (chat.vocab_size, chat.name, chat.eot) == (259, "bytes-chatml", 256)
    assert chat.split_points == "anywhere"
    assert chat.encode("<|im_end|>").tolist() == list(b"<|im_end|>")
    assert chat.fingerprint != plain.fingerprint
    assert add_control_tokens(chat) is chat
    assert chat.vocabulary.count_bytes(np.zeros((1, 3), int), np.array([[256, 257, 258]])) == 0


def test_messages_keep_their_order_and_other_keys():
    roles = ("developer", "user", "user", "assistant", "tool", "assistant", "system", "assistant")
    rows = [{"role": role, "content": role[0], "name": "n"} for role in roles]
    expected = [Message(role, role[0], fields={"name": "n"}) for role in roles]
    assert parse_messages(rows, "f:1") == expected
    encoded = {"function": {"name": "add", "arguments": '{"a": "x"}'}}
    call = {"function": {"name": "add", "arguments": {"a": "x"}}}
    answer = {**ANSWER, "content": None, "tool_calls": [encoded], "weight": 1}
    expected = Message("assistant", "", 1, {"tool_calls": [call]})
    assert parse_messages([answer], "f:1") == [expected]
    for fields in ({"content": "a\ud800"}, {"name": "a\ud800"}):
        with pytest.raises(DataError):
            parse_messages([QUESTION, {**ANSWER, **fields}], "f:1")


def test_only_answers_with_weight_are_trained():
    rows = [ANSWER, *CALLING[:3], {**ANSWER, "content": "", "weight": 0}, QUESTION, ANSWER]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call><|im_end|>'
    for template in open_template("tools")[:2]:
        text = decode_trained(template, parse_messages(rows, "f:1"), tools=[TOOL])
        assert text == f"A<|im_end|>{called}A<|im_end|>"


@pytest.mark.parametrize("given", THOUGHTS)
def test_reasoning_and_variables_reach_the_template(given: str):
    """Under the names that templates read; transformers (5.24) fills in the others."""
    _, template, oracle = open_template("thinking")
    rows = [QUESTION, {**ANSWER, given: "add"}]
    for read in ("reasoning_content", "thinking"):
        jinja = template.jinja.replace("m.reasoning_content", f"m.{read}")
        jinja = "{% if enable_thinking is false %}<think></think>{% endif %}" + jinja
        own = ChatTemplate("own", template.tokenizer, jinja)
        for variables in ({}, {"enable_thinking": False}):
            ids, _ = own.encode(parse_messages(rows, "f:1"), variables=variables)
            assert "add" in own.tokenizer.decode(ids)
            assert ids == oracle.apply_chat_template(
                rows, chat_template=jinja, return_dict=False, **variables
            )


END_COMES_LATE = """
{%- for m in messages %}
    {{- {'user': '<|im_start|>', 'tool': '[INST]', 'system': '<|message|>'}[m.role] or '[/INST]' }}
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
CALL_IS_LEFT_OUT = "{# tool_calls #}" + drop_tags(TEMPLATES["default-system"])


def open_jinja(jinja: str, special: list[str] = CONTROL) -> ChatTemplate:
    inner = byte_level()
    inner.add_special_tokens(special)
    inner.add_tokens([token for token in CONTROL if token not in special])
    return ChatTemplate("own", Tokenizer(inner, "own", inner.token_to_id("<|endoftext|>")), jinja)


def test_an_end_that_comes_with_the_next_message_is_appended():
    """As in trl's training template of GLM, whose answers end so."""
    template = open_jinja(END_COMES_LATE)
    decode = template.tokenizer.decode
    for rows, text, trained in (
        (CALLING[:2], '<|im_start|>Q[/INST]{"a": "x"}[INST]', '{"a": "x"}[INST]'),
        (CALLING[::3], "<|im_start|>Q[/INST]A<|im_start|>", "A<|im_start|>"),
        (
            [*CALLING, QUESTION, ANSWER],
            '<|im_start|>Q[/INST]{"a": "x"}[INST]R[/INST]A<|im_start|>Q[/INST]A<|im_start|>',
            '{"a": "x"}[INST]A<|im_start|>A<|im_start|>',
        ),
    ):
        messages = parse_messages(rows, "f:1")
        assert decode(template.encode(messages)[0]) == text
        assert decode_trained(template, messages) == trained
    assert decode(template.stop_ids) == "<|im_start|><|endoftext|>[INST]"
    prompt = parse_messages(CALLING[:3], "f:1", reply=True)
    assert decode(template.encode(prompt, reply=True)[0]).endswith("R[/INST]")
    system = {"role": "system", "content": "S"}
    with pytest.raises(DataError):  # an end that no model is told to stop at
        template.encode(parse_messages([QUESTION, ANSWER, system, QUESTION, ANSWER], "f:1"))


def test_an_answer_that_is_not_found_in_one_piece_is_refused():
    """A result between a call and the text after it, and a call that the template leaves out."""
    inside, left_out = open_jinja(RESULT_IS_INSIDE), open_jinja(CALL_IS_LEFT_OUT)
    messages = parse_messages(CALLING, "f:1")
    assert decode_trained(inside, messages) == '{"a": "x"}<|eom_id|>A<|im_end|>'
    talking = parse_messages([QUESTION, {**CALLING[1], "content": "T"}, *CALLING[2:]], "f:1")
    for template, refused in ((inside, talking), (left_out, messages)):
        with pytest.raises(DataError, match="f:9"):
            template.encode(refused, where="f:9")
    context = [replace(m, weight=int(m.content == "A")) for m in messages]
    assert decode_trained(left_out, context) == "A<|im_end|>"


def test_an_end_need_not_be_a_special_token():
    template = open_jinja(CALL_IS_LEFT_OUT, special=[])
    assert template.tokenizer.encode("<|im_end|>").tolist() == [template.stop_ids[0]]
    assert decode_trained(template, parse_messages(CALLING[::3], "f:1")) == "A<|im_end|>"


def test_what_a_template_does_not_render_is_refused():
    turns, *_ = open_template("turns")
    user, call = Message("user", "a"), Message("assistant", "", 1, {"tool_calls": [TOOL]})
    for messages, tools, words in (
        ([user, user], None, "alternate"),
        ([user], [TOOL], "tools"),
        ([user, call], None, "tool_calls"),
    ):
        with pytest.raises(DataError, match=words):
            turns.encode(messages, tools=tools)


TEXT_OF_TURN = "{% for m in messages %}<s>{{ m.content }}</s>\r\n{% endfor %}"
NAMED = [
    {"name": "default", "template": TEXT_OF_TURN},
    {"name": "tool_use", "template": "{{ tools | length }}" + TEXT_OF_TURN},
]
PLACES = {
    "text": {"tokenizer_config.json": {"chat_template": TEXT_OF_TURN}},
    "list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "json": {"chat_template.json": {"chat_template": TEXT_OF_TURN}},
    "jinja": {"tokenizer_config.json": {"chat_template": "{"}, "chat_template.jinja": TEXT_OF_TURN},
}


def write_files(folder: Path, files: dict[str, Any]) -> Tokenizer:
    """Write a Hugging Face folder with these files next to its tokenizer, and load it."""
    inner = byte_level()
    inner.add_special_tokens(["<s>", "</s>", "<end>", *CHATML])
    inner.save(f"{folder}/tokenizer.json")
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=3)
        (folder / name).write_bytes(text.encode())
    return load_tokenizer(str(folder))


@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_found_and_saved_unchanged(tmp_path: Path, place: str):
    tokenizer = write_files(tmp_path, PLACES[place])
    template = find_template(tokenizer)
    assert template.jinja == TEXT_OF_TURN
    message = Message("user", "a")
    assert tokenizer.decode(template.encode([message])[0]) == "<s>a</s>\n"
    if place == "list":
        ids, _ = template.encode([message], tools=[TOOL])
        assert tokenizer.decode(ids) == "1<s>a</s>\n"
    tokenizer.vocabulary.save(tmp_path / "saved")
    for name in PLACES[place]:
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / name).read_bytes()
    again = find_template(load_tokenizer(f"{tmp_path}/saved"))
    assert (again.name, again.stop_ids) == (template.name, template.stop_ids)


BAD = """\
no control token after an answer: {% for m in messages %}{{ m.content }}{% endfor %}
control token of parts: {% for m in messages %}{{ m.content }}<end>{{ '<' ~ 's>' }}{% endfor %}
contents dropped: {{ messages[-1].content }}<end>
contents out of order: {% for m in messages | reverse %}{{ m.content }}<end>{% endfor %}
rejects: {{ raise_exception('no') }}
does not parse: {% for %}
attributes: {{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}<end>{% endfor %}
"""


@pytest.mark.parametrize("line", BAD.splitlines())
def test_an_unusable_template_is_refused(tmp_path: Path, line: str):
    jinja = line.split(": ", 1)[1]
    tokenizer = write_files(tmp_path, {"chat_template.jinja": jinja})
    for function in (find_template, add_control_tokens):
        with pytest.raises(ConfigError):
            function(tokenizer)
    assert template_of(tokenizer) is None


def test_tokenizers_without_a_usable_template_are_refused():
    with pytest.raises(ConfigError):
        find_template(load_tokenizer("bytes"))
    vocabulary = {"<|im_start|>": 0, "a": 1, "<|endoftext|>": 2}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    with pytest.raises(DataError):  # a control token that is ordinary text
        add_control_tokens(Tokenizer(inner, "words", 2))


def test_rows_with_tools_are_prepared(tmp_path: Path):
    template, *_ = open_template("tools")
    messages, given = [QUESTION, ANSWER], (None, [TOOL], json.dumps([TOOL]))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"messages": messages, "tools": x}) for x in given))
    source = find_source(str(path))
    prepare_chats(source, tmp_path / "out", template.tokenizer, seq_len=999, val_fraction=0)
    rows = [template.encode(parse_messages(messages, ""), tools=x) for x in (None, *[[TOOL]] * 2)]
    found = open_rows(load_dataset(tmp_path / "out"), "train").sequence(0)
    assert found == tuple(list(chain(*column)) for column in zip(*rows, strict=True))
