"""Turn conversations into token ids with a chat template, and mark the tokens to train on.

A template is jinja text: ChatML, Llama-3, nanochat's, or the one saved with the tokenizer. Only the template
can produce control tokens: it is rendered with a placeholder for each message, and the contents of
the messages are then encoded as plain text, even where they spell a control token.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jinja2
import xxhash
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import ConfigError, DataError
from megatoken.system.atomic_write import MALFORMED

ROLES = ("system", "developer", "user", "assistant", "tool")
CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NANOCHAT = ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>")
# Control tokens of other chat models. A tokenizer with one of them needs the template that it was
# trained with.
OTHER_CHATS = {
    *("[INST]", "<start_of_turn>", "<|header_start|>", "<|start_of_role|>", "<|user|>"),
    *("<|START_OF_TURN_TOKEN|>", "<|start|>", "<｜User｜>"),
}
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
# A message's placeholder. The vertical tabs around it disappear if the template strips contents.
_PLACEHOLDER = "\v\ue000{}\ue001\v"
_FIND_PLACEHOLDER = re.compile("(\v?)\ue000([0-9]+)\ue001(\v?)")
_MASK_TAG = re.compile(r"(\{%-?)\s*(end)?generation\s*(-?%\})")


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


_PROBE = [Message("user", "Hi?\n"), Message("assistant", "1. yes"), Message("user", "ok 2")]


class ChatTemplate:
    """Encodes conversations for one tokenizer.

    name: chatml, llama-3, nanochat, or own-HASH for a template saved with the tokenizer. stop_ids: ids that
    end an answer; the model is trained to emit the first one. jinja: the text of the template,
    which can contain transformers' {% generation %} tags.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, jinja: str) -> None:
        """Compile and check the template. Raises ConfigError if it cannot be used."""
        self.name, self.tokenizer = name, tokenizer
        begin = {tokenizer.decode([id]): id for id in tokenizer.bos_ids}
        is_own = name not in BUILT_IN
        prefix = "" if is_own else "".join(f"{{{{ {json.dumps(token)} }}}}" for token in begin)
        self.jinja = prefix + jinja
        self._control_ids = tokenizer.special_ids | begin
        by_length = sorted(self._control_ids, key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(map(re.escape, by_length))})")
        stop_id = self._find_stop_id()
        if is_own:
            self._check_ids()
        self.stop_ids = tuple(dict.fromkeys((stop_id, tokenizer.eot, *tokenizer.end_ids)))

    def encode(
        self,
        messages: Sequence[Message],
        *,
        reply: bool = False,
        where: str = "",
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return a conversation's ids, and for each id whether it is trained on.

        Answers and their stop tokens are trained on. Some tokenizers join white space at the end of
        a header with the start of the answer; such a token is trained on too. reply: also append
        the assistant's header, for the model to continue. where: location of the conversation, for
        error messages. tools: JSON schemas of the functions that the model can call. Raises
        DataError if the template rejects the conversation or changes the content of a message.
        """
        ids: list[int] = []
        trained: list[bool] = []
        text = ""  # text since the last control token
        answer = -1  # index at which an answer starts in `text`, or -1

        def flush() -> None:
            tokens = self.tokenizer.encode(text).tolist()
            n_header = len(tokens)
            if answer >= 0:
                n_header = self.tokenizer.count_tokens_within(text, answer)
            ids.extend(tokens)
            trained.extend([False] * n_header + [True] * (len(tokens) - n_header))

        for template_text, content, is_trained in self._list_parts(messages, reply, where, tools):
            for part in self._control.split(template_text):
                if part not in self._control_ids:
                    text += part
                    continue
                flush()
                ids.append(self._control_ids[part])
                trained.append(answer >= 0)
                text, answer = "", -1
            if is_trained:
                answer = len(text)
            text += content
        flush()
        return ids, trained

    def _list_parts(
        self, messages: Sequence[Message], reply: bool, where: str, tools: Any = None
    ) -> Iterator[tuple[str, str, bool]]:
        """Yield (template text, content after it, whether the content is trained on) per message.

        A last triple holds the template text after all messages, with empty content.
        """
        placeholders = [_PLACEHOLDER.format(number) for number in range(len(messages))]
        split = _FIND_PLACEHOLDER.split(self._render(messages, placeholders, reply, where, tools))
        contents = []
        for left, number, right in zip(split[1::4], split[2::4], split[3::4], strict=True):
            content = messages[int(number)].content
            content = content if left else content.lstrip()
            contents.append(content if right else content.rstrip())
        order = list(map(int, split[2::4]))
        texts = split[::4]
        rebuilt = "".join(map("".join, zip(texts, [*contents, ""], strict=True)))
        plain = [message.content for message in messages]
        expected = self._render(messages, plain, reply, where, tools)
        if order != list(range(len(messages))) or rebuilt != expected:
            what = f"chat template {self.name} changes or drops the content of a message"
            raise DataError(what, where, "leave the conversation out")
        for message, content, text in zip(messages, contents, texts, strict=False):
            yield text, content, message.role == "assistant" and message.weight > 0
        yield texts[-1], "", False

    def _render(
        self,
        messages: Sequence[Message],
        contents: Sequence[str],
        reply: bool,
        where: str,
        tools: Any = None,
    ) -> str:
        system = "developer" if "developer" in self.jinja else "system"
        rows = [
            {
                **message.fields,
                "role": system if message.role == "developer" else message.role,
                "content": content,
            }
            for message, content in zip(messages, contents, strict=True)
        ]
        try:
            return self._compiled.render(messages=rows, tools=tools, add_generation_prompt=reply)
        except Exception as error:  # a template can fail in any way
            what = f"chat template {self.name} rejects the conversation: {error!s:.200}"
            raise DataError(what, where, "leave the conversation out") from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        plain = _MASK_TAG.sub(
            lambda tag: f"{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}", self.jinja
        )
        try:
            return environment.from_string(plain)
        except jinja2.TemplateError as error:
            what = f"cannot parse the chat template: {error!s:.200}"
            raise ConfigError(what, self.tokenizer.name, "fix chat_template.jinja") from error

    def _find_stop_id(self) -> int:
        """Return the id of the control token that the template puts after an answer."""
        try:
            text = list(self._list_parts(_PROBE, False, self.tokenizer.name))[2][0]
        except DataError as error:
            raise ConfigError(f"unusable chat template: {error}", "", "use another one") from error
        stop = self._control.match(text)
        if not stop or not stop[0]:
            what = f"chat template {self.name} does not end an answer with a control token"
            raise ConfigError(what, self.tokenizer.name, "use another template")
        return self._control_ids[stop[0]]

    def _check_ids(self) -> None:
        """Raise ConfigError if `encode` and encoding the whole text give different ids.

        They can differ because `encode` encodes the text between control tokens separately.
        """
        text = self._render(_PROBE, [message.content for message in _PROBE], True, "")
        if self.encode(_PROBE, reply=True)[0] != self.tokenizer.encode_control(text):
            what = f"chat template {self.name}: text next to control tokens changes their ids"
            raise ConfigError(what, self.tokenizer.name, "use another tokenizer")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def find_template(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the built-in template for a tokenizer's control tokens, or else the one saved with it.

    Raises ConfigError if there is neither, or if the template cannot be used.
    """
    for name, (control_tokens, jinja) in BUILT_IN.items():
        if tokenizer.special_ids.keys() >= set(control_tokens):
            return ChatTemplate(name, tokenizer, jinja)
    if tokenizer.chat_template:
        digest = xxhash.xxh3_64_hexdigest(tokenizer.chat_template.encode())
        return ChatTemplate(f"own-{digest[:8]}", tokenizer, tokenizer.chat_template)
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

    A chat model's tokenizer is returned unchanged; any other is copied and given ChatML's control
    tokens. Raises ConfigError if a chat model's template is missing or cannot be used, and
    DataError if the tokens cannot be added.
    """
    is_chat = tokenizer.chat_template or OTHER_CHATS & tokenizer.special_ids.keys()
    if is_chat or template_of(tokenizer):
        find_template(tokenizer)
        return tokenizer
    return tokenizer.add_special_tokens(CHATML, f"{tokenizer.name}-chatml")


def parse_messages(rows: Any, where: str, *, reply: bool = False) -> list[Message]:
    """Convert OpenAI's rows {"role", "content", "weight" (optional), ...} to messages.

    Roles can come in any order; the template decides which orders it renders. reply: whether a
    model will answer. If not, there must be an answer to train on. where: location of the rows, for
    error messages. Raises DataError if the rows are not such a conversation.
    """
    if not isinstance(rows, list) or not rows:
        raise DataError("not a list of messages", where, 'write [{"role": ..., "content": ...}]')
    messages = [
        _parse_message(row, f"{where}, message {number}") for number, row in enumerate(rows, 1)
    ]
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
        fields = {key: value for key, value in row.items() if value is not None}
        role, weight, content = (
            fields.pop("role"),
            fields.pop("weight", 1),
            fields.pop("content", None),
        )
        if "tool_calls" in fields:
            fields["tool_calls"] = [_parse_arguments(call) for call in fields["tool_calls"]]
            content = content or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        is_valid = role in ROLES and isinstance(content, str) and weight in (0, 1)
    except MALFORMED:
        is_valid = False
    if not is_valid:
        fix = f"use a role of {', '.join(ROLES)}, text as content, and a weight of 0 or 1 or none"
        raise DataError("not a message", where, fix)
    return Message(role, content, weight, fields)


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object, as templates expect, not OpenAI's JSON."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            function = {**function, "arguments": json.loads(arguments)}
    return {**call, "function": function} if "function" in call else function
