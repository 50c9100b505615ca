"""Turn conversations into token ids with a chat template, and mark the tokens to train on.

A template is jinja text: the model's own, or else ChatML, Llama-3 or nanochat's. Only the template
can produce control tokens: in its text, and nowhere else, they are replaced by names that no message
contains (`Tokenizer.control_names`). Ids and masks equal those of transformers'
`apply_chat_template`, except that a control token spelled in a message is plain text.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jinja2
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatoken.data.tokenizer import TOKEN_IDS, Tokenizer, name_control
from megatoken.errors import ConfigError, DataError
from megatoken.system.atomic_write import MALFORMED

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
# Marks of what {% generation %} encloses, and another answer. No message contains them.
_START, _END, _OTHER = (f"{first}{secrets.token_hex(8)}" for first in "\ue002\ue003\ue004")
_MASK_TAG = re.compile(r"(\{%-?)\s*(end)?generation\s*(-?%\})")


Render = Callable[[Sequence["Message"], bool], tuple[str, list[int]]]


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


_PROBE = [Message("user", "Hi 1"), Message("assistant", "yes 2"), Message("user", "ok 3")]
_AFTER_ANSWER = re.compile("Hi 1.*yes 2\\s*\ue000\\w+:([0-9]+)\ue001.*ok 3", re.DOTALL)


class ChatTemplate:
    """Encodes conversations for one tokenizer.

    name: chatml, llama-3, nanochat, or own-HASH for the model's own. stop_ids: ids that end an
    answer; the model is trained to emit the first one. jinja: the text of the template, which can
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
        self.stop_ids = (self._find_stop_id(), tokenizer.eot, *tokenizer.end_ids)
        self.stop_ids = tuple(dict.fromkeys(self.stop_ids))
        self._stop = re.compile("|".join(map(name_control, self.stop_ids)))

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

        Answers and their stop tokens are trained on: what the template's {% generation %} tags
        enclose or, without such tags, what follows the header of an answer, up to its stop token. A
        token that is partly in an answer is trained on too. reply: also append the assistant's
        header, for the model to continue; answers are then not searched for. where: location of the
        conversation, for error messages. tools: JSON schemas of the functions that the model can
        call. variables: further variables of the template, such as enable_thinking. Raises DataError
        if the template rejects the conversation or has no place for tools.
        """
        render = partial(self._render, tools=tools, where=where, variables=variables)
        text, marks = render(messages, reply)
        encoding = self.tokenizer.encode_control(text)
        spans = list(zip(marks[::2], marks[1::2], strict=True))
        if not (reply or (spans and all(message.weight for message in messages))):
            answers = self._find_answers(messages, text, render)
            spans = [span for span in spans if any(a <= span[0] < b for a, b in answers)] or answers
        trained = []
        spans.append((len(text) + 1, len(text) + 1))
        for first, last in encoding.offsets:
            while spans[0][1] <= first:
                del spans[0]
            trained.append(last > spans[0][0])
        return encoding.ids, trained

    def _find_answers(
        self, messages: Sequence[Message], text: str, render: Render
    ) -> list[tuple[int, int]]:
        """Return the (start, end) of each answer to train on in `text`, which holds all messages.

        An answer is what follows its prompt or, if `text` does not begin with the prompt, what
        differs from the text with another answer; it ends with a stop token.
        """
        spans = []
        for i, message in enumerate(messages):
            if message.role != "assistant" or not message.weight:
                continue
            prompt = ""
            with suppress(DataError):  # the template can reject the messages before the answer
                prompt, _ = render(messages[:i], True)
            start = len(prompt)
            if i == 0 or not prompt or not text.startswith(prompt):
                answer = replace(message, content=_OTHER, fields={})
                other, _ = render([*messages[:i], answer, *messages[i + 1 :]], False)
                pairs = enumerate(zip(other, text, strict=False))
                start = next((at for at, (a, b) in pairs if a != b), len(text))
            stop = self._stop.search(text, start)
            spans.append((start, stop.end() if stop else len(text)))
        return spans

    def _render(
        self,
        messages: Sequence[Message],
        reply: bool,
        *,
        tools: Any = None,
        where: str = "",
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Return the text of a conversation, and where {% generation %} tags start and end in it."""
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
        try:
            marked = template.render(
                messages=rows,
                tools=tools or None,
                documents=None,
                add_generation_prompt=reply,
                **{**self._variables, **(variables or {})},
            )
        except Exception as error:  # a template can fail in any way
            what = f"chat template {self.name} rejects the conversation: {error!s:.200}"
            raise DataError(what, where, "leave the conversation out") from error
        parts = re.split(f"{_START}|{_END}", marked)
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
        marked = _MASK_TAG.sub(
            lambda tag: f"{tag[1]} {'endfilter' if tag[2] else 'filter answer'} {tag[3]}", jinja
        )
        try:
            tree = environment.parse(marked)
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

    def _find_stop_id(self) -> int:
        """Return the id of the control token that the template puts after an answer."""
        try:
            text, _ = self._render(_PROBE, False)
        except DataError as error:
            raise ConfigError(f"unusable chat template: {error}", "", "use another one") from error
        end = _AFTER_ANSWER.search(text)
        if not end or self._control.search(text):
            what = f"chat template {self.name} does not end an answer with a control token"
            if end:
                what = f"chat template {self.name} builds control tokens from parts"
            raise ConfigError(what, self.tokenizer.name, "use another template")
        return int(end[1])


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Replace jinja's filter, which escapes HTML and sorts keys, as transformers does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def drop_marks(template: ChatTemplate) -> str:
    """Return a built-in template without {% generation %} tags, which plain jinja2 rejects.

    The model's own is returned unchanged.
    """
    if template.name not in BUILT_IN:
        return template.jinja
    return template.jinja.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def find_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the model's own template, or else the built-in one for the tokenizer's control tokens.

    Raises ConfigError if there is neither, or if the template cannot be used.
    """
    own = tokenizer.templates
    for name, (control_tokens, jinja) in BUILT_IN.items():
        if tokenizer.special_ids.keys() >= set(control_tokens):
            template = ChatTemplate(name, tokenizer, jinja)
            if own in ({}, {"default": drop_marks(template)}):
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
    """Convert OpenAI's rows {"role", "content", "weight" (optional), ...} to messages.

    Roles can come in any order; the template decides which orders it renders. reply: whether a
    model will answer. If not, there must be an answer to train on. where: location of the rows, for
    error messages. n_context: answers in this many first messages get weight 0. Raises DataError if
    the rows are not such a conversation.
    """
    if not isinstance(rows, list) or not rows:
        raise DataError("not a list of messages", where, 'write [{"role": ..., "content": ...}]')
    messages = [
        _parse_message(row, f"{where}, message {number}") for number, row in enumerate(rows, 1)
    ]
    for i in range(min(n_context, len(messages))):
        if messages[i].role == "assistant":
            messages[i] = replace(messages[i], weight=0)
    if reply and messages[-1].role == "assistant":
        raise DataError("the last message is the assistant's", where, "remove it")
    if not reply and any(message.role == "user" and _is_blank(message) for message in messages):
        raise DataError("a blank message of the user", where, "leave it out")
    answers = [message for message in messages if message.role == "assistant" and message.weight]
    if not reply and all(map(_is_blank, answers)):
        raise DataError("no message of the assistant to train on", where, "leave it out")
    return messages


def _is_blank(message: Message) -> bool:
    return not (message.content.strip() or message.fields.get("tool_calls"))


def _parse_message(row: Any, where: str) -> Message:
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
            other = [part["type"] for part in content if "text" not in part]
            if other:
                what = f"content of type {other[0]!s:.40} is not supported"
                raise DataError(what, where, "leave it out, only text is supported")
            content = "".join(part["text"] for part in content)
        is_valid = role in ROLES and isinstance(content, str) and {*weights} <= {0, 1}
    except MALFORMED:
        is_valid = False
    if not is_valid:
        fix = f"use a role of {', '.join(ROLES)}, text as content, and a weight of 0 or 1 or none"
        raise DataError("not a message", where, fix)
    return Message(role, content, int(all(weights)), fields)


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates expect, not OpenAI's JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            function = {**function, "arguments": json.loads(arguments)}
    return {**call, "function": function} if "function" in call else function
