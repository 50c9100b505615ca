"""Turn conversations into token ids with a chat template, with a mask of the tokens to train on.

A template is jinja text: the model's own, or else ChatML, Llama-3 or nanochat's. Only the template
can produce control tokens: in its text alone, they are replaced by names that no message contains
(`Tokenizer.control_names`). Ids and masks equal those of transformers' `apply_chat_template`, but a
control token spelled in a message is plain text.
"""

import json
import re
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

import jinja2
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatoken.base.errors import ConfigError, DataError
from megatoken.base.system.atomic_write import MALFORMED
from megatoken.text.tokenizer import TOKEN_IDS, Tokenizer, name_control

ROLES = ("system", "developer", "user", "assistant", "tool")
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NANOCHAT = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")
# Keys of a message that say whether it is trained on, in OpenAI's and other programs' files.
WEIGHTS = ("weight", "train", "trainable", "loss", "loss_mask")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
TRAIN_SFT = "megatoken train sft --init RUN --out OUT data.path=DATA"

_CHATML = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_LLAMA_3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ (message['content'] | trim) + '<|eot_id|>' }}{% endgeneration %}"
    "{% else %}{{ (message['content'] | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
_NANOCHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant_start|>' }}"
    "{% generation %}{{ message['content'] + '<|assistant_end|>' }}{% endgeneration %}{% else %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'system' %}{{ '<|user_start|>' }}{% endif %}"
    "{{ message['content'] + ('\\n\\n' if message['role'] == 'system' else '<|user_end|>') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"
)
BUILT_IN = {  # control tokens, template
    "chatml": (CHATML, _CHATML),
    "llama-3": (LLAMA_3, _LLAMA_3),
    "nanochat": (NANOCHAT, _NANOCHAT),
}
_LEAVE_OUT = "leave the conversation out"
# Random markers that no message contains. _START and _END surround the text that {% generation %}
# tags enclose. _DIGITS surround a message's number in the label that replaces its texts.
_START, _END = (f"{first}{secrets.token_hex(8)}" for first in "\ue002\ue003")
_DIGITS = str(secrets.randbelow(9 * 10**17) + 10**17)
_LABEL = re.compile(f"{_DIGITS}([0-9]+?){_DIGITS}")
_COMPARED = {"role", "id", "name", "tool_call_id", "type"}  # values that templates compare
_GENERATION_TAG = re.compile(r"(\{%-?)\s*(end)?generation\s*(-?%\})")


Render = Callable[[Sequence["Message"], bool, bool], tuple[str, list[int]]]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    role: one of ROLES. weight: 1, or 0 for an answer that is not trained on. fields: other keys
    that templates read, such as tool_calls, tool_call_id, name and reasoning_content.
    """

    role: str
    content: str
    weight: int = 1
    fields: dict[str, Any] = field(default_factory=dict)


# Conversations that show how an answer ends; the key says whether the answer calls a tool.
_PROBES = {
    False: """[{"role": "user", "content": "Hi 1"}, {"role": "assistant", "content": "yes 2"},
        {"role": "user", "content": "ok 3"}]""",
    True: """[{"role": "user", "content": "Hi 1"}, {"role": "assistant", "tool_calls": [{"id":
        "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": "yes 2"}}}]},
        {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "ok 3"}]""",
}
_TOOLS = """[{"type": "function", "function": {"name": "f", "description": "f", "parameters":
    {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}}}]"""


class ChatTemplate:
    """Encodes conversations for one tokenizer.

    name: chatml, llama-3, nanochat, or own-HASH for the model's own. stop_ids: ids that end an
    answer; the first one ends an answer to the user. jinja: the text of the template, which can
    contain transformers' {% generation %} tags.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, jinja: str, tool_jinja: str = "") -> None:
        """Compile and check the template. Raises ConfigError if it cannot be used.

        tool_jinja: the template of conversations with tools, if it is another one.
        """
        self.name, self.tokenizer = name, tokenizer
        if name in BUILT_IN:
            begin = [json.dumps(tokenizer.decode([id])) for id in tokenizer.bos_ids]
            jinja = "".join(f"{{{{ {token} }}}}" for token in begin) + jinja
        self.jinja = jinja
        names = tokenizer.control_names
        longest_first = sorted(names, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        tokens = tokenizer.named_tokens.items()
        self._variables = {key: names.get(token, token) for key, token in tokens}
        texts = (jinja, tool_jinja or jinja)
        self._templates = [(text, self._compile(text)) for text in texts]  # without, with tools
        plain = calling = self._probe(False)
        with suppress(ConfigError):  # the template has no tools
            calling = self._probe(True)
        self._last_ends = (plain[0][0], calling[0][0])
        self._end = re.compile("|".join(re.escape(end) for end, _ in plain + calling))
        stops = (int(plain[0][1]), tokenizer.eot, int(calling[0][1]), *tokenizer.end_ids)
        self.stop_ids = tuple(dict.fromkeys(stops))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        reply: bool = False,
        where: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return a conversation's ids, and for each id whether it is trained on.

        Answers and the control tokens that end them are trained on. An answer is the text that the
        template's {% generation %} tags enclose or, without such tags, the text that the template
        adds to the answer's prompt, up to the next message. If the template writes the end of an
        answer only before the next message, that end is appended to the last answer. A token that
        is partly in an answer is trained on, too.

        reply: also append the assistant's header, for the model to continue; then no token is
        trained on. where: location of the conversation, for error messages. tools: JSON schemas of
        the functions that the model can call. variables: further variables of the template, such as
        enable_thinking. Raises DataError if the template rejects the conversation, does not support
        tools, or does not show where an answer begins and ends.
        """
        render = partial(self._render, tools=tools, where=where, variables=variables)
        text, bounds = render(messages, reply, False)
        spans = list(zip(bounds[::2], bounds[1::2], strict=True))
        if not (reply or (spans and all(message.weight for message in messages))):
            late_end = self._last_ends["tool_calls" in messages[-1].fields]
            try:
                answers = self._find_answers(messages, text, late_end + _END, render)
            except ValueError as error:
                what = f"chat template {self.name} leaves out an answer, or does not end it"
                raise DataError(what, where, _LEAVE_OUT) from error
            spans = [span for span in spans if any(a < span[1] and span[0] < b for a, b in answers)]
            if not spans:
                text = (text + late_end)[: max([len(text), *(end for _, end in answers)])]
                spans = answers
        encoding = self.tokenizer.encode_control(text)
        offsets = encoding.offsets
        trained = [False] * len(offsets)
        for start, end in spans:
            first = bisect_right(offsets, start, key=itemgetter(1))
            last = bisect_left(offsets, end, key=itemgetter(0))
            trained[first:last] = [True] * (last - first)
        return encoding.ids, trained

    def _find_answers(
        self, messages: Sequence[Message], text: str, tail: str, render: Render
    ) -> list[tuple[int, int]]:
        """Return the (start, end) of each answer to train on in `text`, which holds all messages.

        Rendering the conversation with labels instead of texts shows what the template writes
        around them. An answer starts after the header that the template also adds to a prompt. It
        ends with a control token before the first text of the next message. tail: the end of the
        last answer, which `text` may lack, and a marker. Raises ValueError if an answer is not
        found.
        """
        text += tail
        head, *rest = _LABEL.split(render(messages, False, True)[0] + tail)
        texts, at = [(-1, 0, 0)], len(head)  # message number, start, end
        for number, gap in zip(map(int, rest[::2]), rest[1::2], strict=True):
            earlier = {messages[i].role for i, *_ in texts[1:]}
            if number < texts[-1][0] and earlier <= {"system", "developer"}:
                del texts[1:]  # the template puts these messages before all others
            texts.append((number, at, text.index(gap, at)))
            at = texts[-1][2] + len(gap)
        texts.append((len(text), at, at))
        if texts != sorted(texts) or not text.startswith(head):
            raise ValueError
        spans = []
        for i, message in enumerate(messages):
            if message.role != "assistant" or not message.weight:
                continue
            calls, header = "tool_calls" in message.fields, ""
            first, following = (bisect_left(texts, (number,)) for number in (i, i + 1))
            before, start = texts[first - 1][2], texts[first][1]
            if i:
                with suppress(DataError):  # the template can reject the messages before the answer
                    header = _LABEL.split(render(messages[:i], True, True)[0])[-1]
            n = next(n for n in range(len(header), -1, -1) if text.startswith(header[:n], before))
            if header and (calls or n == len(header)):
                start = min(before + n, start)
            end = self._end.search(text, max(texts[following - 1][2], start), texts[following][1])
            if not end or (first == following and calls and not text[start : end.start()].strip()):
                raise ValueError
            spans.append((start, end.end()))
        return spans

    def _render(
        self,
        messages: Sequence[Message],
        reply: bool,
        labels: bool = False,
        *,
        tools: Any = None,
        where: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Return the text of a conversation, and where {% generation %} tags start and end in it.

        labels: replace each text by a label with the message's number.
        """
        jinja, template = self._templates[bool(tools)]
        has_calls = any("tool_calls" in message.fields for message in messages)
        for key, is_used in (("tools", tools), ("tool_calls", has_calls)):
            if is_used and key not in jinja:
                fix = "leave them out, or use a model whose template has them"
                raise DataError(f"chat template {self.name} has no {key}", where, fix)
        developer = "developer" if "developer" in jinja else "system"
        rows = [
            {
                **message.fields,
                "role": developer if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in messages
        ]
        for i, row in enumerate(rows if labels else ()):
            label = f"{_DIGITS}{i}{_DIGITS}"
            if i or row["role"] != "system":  # templates look for options in a system prompt
                rows[i] = _label_texts(row, label)
            if not (row["content"].strip() or "tool_calls" in row):
                rows[i]["content"] = label
        try:
            rendered = template.render(
                messages=rows,
                tools=tools or None,
                documents=None,
                add_generation_prompt=reply,
                **{**self._variables, **(variables or {})},
            )
        except Exception as error:  # a template can fail in any way
            what = f"chat template {self.name} rejects the conversation: {error!s:.200}"
            raise DataError(what, where, _LEAVE_OUT) from error
        parts = re.split(f"{_START}|{_END}", rendered)
        return "".join(parts), list(accumulate(map(len, parts)))[:-1]

    def _compile(self, jinja: str) -> jinja2.Template:
        """Compile a template as transformers does, with its control tokens replaced by their names."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = time.strftime
        environment.filters["tojson"] = _to_json
        environment.filters["answer"] = lambda text: f"{_START}{text}{_END}"
        filtered = _GENERATION_TAG.sub(
            lambda tag: f"{tag[1]} {'endfilter' if tag[2] else 'filter answer'} {tag[3]}", jinja
        )
        try:
            tree = environment.parse(filtered)
            for text in tree.find_all(jinja2.nodes.TemplateData):
                text.data = self._rename(text.data)
            for constant in tree.find_all(jinja2.nodes.Const):
                if isinstance(constant.value, str):
                    constant.value = self._rename(constant.value)
            return environment.from_string(tree)
        except jinja2.TemplateError as error:
            what = f"cannot parse the chat template: {error!s:.200}"
            raise ConfigError(what, self.tokenizer.name, "fix chat_template.jinja") from error

    def _rename(self, text: str) -> str:
        return self._control.sub(lambda token: self.tokenizer.control_names[token[0]], text)

    def _probe(self, calls: bool) -> list[tuple[str, str]]:
        """Return the control tokens that end an answer, each with its id.

        The first one ends the last message; there is a second if earlier answers end with another.
        calls: whether the answer calls a tool.
        """
        messages = parse_messages(json.loads(_PROBES[calls]), "", reply=True)
        tools = json.loads(_TOOLS) if calls and "tools" in self._templates[True][0] else None
        try:
            alone, text = (self._render(messages[:n], False, tools=tools)[0] for n in (2, 3))
        except DataError as error:
            raise ConfigError(f"unusable chat template: {error}", "", "use another one") from error
        between = re.search("Hi 1.*yes 2(.*)ok 3", text, re.DOTALL)
        if between and not self._control.search(text):
            tail = alone.rpartition("yes 2")[2]
            control = f"({name_control(0).replace(':0', ':([0-9]+)')})"
            own, others = (re.findall(control, part) for part in (tail, between[1]))
            if tail.strip() and not (own or calls):
                ids = self.tokenizer.encode_control(tail.strip()).ids
                own = [(tail.strip(), str(id)) for id in ids if len(ids) == 1]  # not special
            ends = own[-1:] or others[:1]
            if ends:
                return ends if ends[0][0] in between[1] else ends + others[:1]
        problem = "leaves out a message, or does not end an answer with a whole control token"
        what = f"chat template {self.name} {problem}"
        raise ConfigError(what, self.tokenizer.name, "use another template")


def _label_texts(value: Any, label: str, key: str = "") -> Any:
    """Replace the texts in a message by a label, except those that templates compare."""
    if isinstance(value, dict):
        return {name: _label_texts(item, label, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_label_texts(item, label) for item in value]
    if not isinstance(value, str) or key in _COMPARED or not value.strip():
        return value
    _, *parts = re.split("(</?think>)", value)  # templates look for these tags
    return label + "".join(
        label if i % 2 and part.strip() else part for i, part in enumerate(parts)
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Replace jinja's filter, which escapes HTML and sorts keys, as transformers does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def drop_generation_tags(template: ChatTemplate) -> str:
    """Return a built-in template without {% generation %} tags, which plain jinja2 rejects.

    The model's own is returned unchanged.
    """
    is_own = template.name not in BUILT_IN
    return template.jinja if is_own else _GENERATION_TAG.sub("", template.jinja)


def find_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the model's own template, or else the built-in one for the tokenizer's control tokens.

    Raises ConfigError if there is neither, or if the template cannot be used.
    """
    own = tokenizer.templates
    for name, (control_tokens, jinja) in BUILT_IN.items():
        if tokenizer.special_ids.keys() >= set(control_tokens):
            template = ChatTemplate(name, tokenizer, jinja)
            if own in ({}, {"default": drop_generation_tags(template)}):
                return template
    if own:
        texts = [own.get("default", next(iter(own.values()))), own.get("tool_use", "")]
        digest = xxhash.xxh3_64_hexdigest("".join(texts).encode())
        return ChatTemplate(f"own-{digest[:8]}", tokenizer, *texts)
    fix = f"copy the model's chat_template.jinja next to it, or give it one: {TRAIN_SFT}"
    raise ConfigError(f"tokenizer {tokenizer.name} has no chat template", "", fix)


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return a tokenizer's chat template, or None if it has no usable one."""
    try:
        return find_template(tokenizer)
    except ConfigError:
        return None


def find_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that end a generation.

    These are the ids that the model's config files name, or else the chat template's stop ids, or
    else only end-of-text.
    """
    if tokenizer.end_ids:
        return tokenizer.end_ids
    template = template_of(tokenizer)
    return template.stop_ids if template else (tokenizer.eot,)


def add_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that can encode conversations.

    A tokenizer without a chat template is given ChatML's control tokens. If its files name ends, the
    template's stop tokens are added to them, because a model learns these from conversations.
    Raises ConfigError if its template cannot be used, and DataError if tokens cannot be added.
    """
    if not (tokenizer.templates or template_of(tokenizer)):
        tokenizer = tokenizer.add_special_tokens(CHATML, f"{tokenizer.name}-chatml")
    template = find_template(tokenizer)
    if not tokenizer.end_ids:
        return tokenizer
    ids = {"bos_token_id": [tokenizer.bos], "eos_token_id": template.stop_ids}
    return tokenizer.with_files({**tokenizer.files, TOKEN_IDS: json.dumps(ids)})


def parse_messages(
    rows: Any, where: str, *, reply: bool = False, n_context: int = 0
) -> list[Message]:
    """Convert OpenAI's objects {"role", "content", "weight" (optional), ...} to messages.

    Roles can come in any order; the template decides which orders it renders. reply: whether a
    model will answer. If not, there must be an answer to train on. where: location of the
    conversation, for error messages. n_context: answers in this many first messages get weight 0.
    Raises DataError if `rows` is not such a conversation.
    """
    if not isinstance(rows, list) or not rows:
        raise DataError("not a list of messages", where, 'write [{"role": ..., "content": ...}]')
    messages = [
        _parse_message(row, f"{where}, message {number}", number > n_context)
        for number, row in enumerate(rows, 1)
    ]
    if reply:
        if messages[-1].role == "assistant":
            raise DataError("the last message is the assistant's", where, "remove it")
        return messages
    if not any(message.role == "assistant" and message.weight for message in messages):
        raise DataError("no message of the assistant to train on", where, "leave it out")
    for message in messages:
        is_blank = not (message.content.strip() or "tool_calls" in message.fields)
        if is_blank and message.weight and message.role in ("user", "assistant"):
            raise DataError(f"a blank message of the {message.role}", where, "leave it out")
    return messages


def _parse_message(row: Any, where: str, is_trained: bool) -> Message:
    try:
        json.dumps(row, ensure_ascii=False).encode()  # fails for a lone surrogate
        fields = {key: value for key, value in row.items() if value not in (None, [])}
        role, content = fields.pop("role"), fields.pop("content", "")
        weights = [fields.pop(key) for key in WEIGHTS if key in fields]
        thoughts = [fields[key] for key in THOUGHTS if key in fields]
        if thoughts:  # under the names that templates read
            fields = {"thinking": thoughts[0], **fields, "reasoning_content": thoughts[0]}
        if "tool_calls" in fields:
            fields["tool_calls"] = [_parse_arguments(call) for call in fields["tool_calls"]]
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        is_valid = role in ROLES and isinstance(content, str) and {*weights} <= {0, 1}
    except MALFORMED:
        is_valid = False
    if not is_valid:
        fix = (
            f"use a role of {', '.join(ROLES)}, text and no images, and a weight of 0 or 1 or none"
        )
        raise DataError("not a message", where, fix)
    return Message(role, content, int(role != "assistant" or (is_trained and all(weights))), fields)


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates expect, not OpenAI's JSON."""
    if "function" in call:
        return call | {"function": _parse_arguments(call["function"])}
    with suppress(*MALFORMED):
        call = call | {"arguments": json.loads(call["arguments"])}
    return call
