"""`megatoken chat MODEL`: talk to a model in the terminal, or ask it once. Nothing is saved."""

import json
import re
import select
import sys
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatoken.base.console import MUTED, Console, format_count, format_quantity, spell_controls
from megatoken.base.errors import ConfigError
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.model.flops import count_parameters

try:
    import readline
except ImportError:  # input() then has no history
    readline = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from megatoken.inference.conversation import Answer, Conversation

HELP = "talk to a chat model in the terminal, or ask it once"
EXAMPLE = "megatoken chat runs/sft"
PASTE_SECONDS = 0.05  # between the lines of a pasted text
QUOTES = '"""'
COMMANDS = {
    "/clear": "forget the conversation",
    "/exit": "leave, like Ctrl-D or Ctrl-C twice",
    "/help": "show this list",
    QUOTES: "start and end a message of several lines",
}


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, json_object=json_object)


def json_object(text: str) -> Any:
    """Parse JSON; argparse names this function in its error."""
    return json.loads(text)


def run(options: Namespace, console: Console) -> Data:
    from megatoken.base.system.device import memory_errors

    with memory_errors("chat", "use --precision bf16 or --device cpu"):
        return chat(options, console)


def chat(options: Namespace, console: Console) -> Data:
    """Talk until the user leaves, or answer one message."""
    from megatoken.inference.conversation import Conversation
    from megatoken.inference.open_model import open_model
    from megatoken.inference.sampling import Sampling
    from megatoken.text.chat_template import Message, find_template

    sampling = Sampling(
        options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    text = options.prompt
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.buffer.read().decode(errors="replace").strip("\n")
    if text is None and options.json:
        raise ConfigError("--json needs a message", "--json", "give -p TEXT, or use a pipe")
    for name, message in (("message", text), ("--system", options.system)):
        if message is not None and not message.strip():
            raise ConfigError("empty text", name, "give some, or leave it out")
    loaded, device = open_model(options, Console(to_stderr=True).warn)
    conversation = Conversation(
        loaded.model,
        find_template(loaded.tokenizer),
        sampling,
        device,
        [Message("system", options.system)] if options.system else [],
        variables=options.chat_template_kwargs,
    )
    if text is not None:
        answer = ask(conversation, text, options, console)
        if answer.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return {**asdict(answer), "model": loaded.source}
    config = loaded.model.config
    size = f"{format_quantity(count_parameters(config))} parameters"
    console.print(f"{loaded.source}: {size}, context {config.seq_len:,} tokens", MUTED)
    console.print("/help lists commands; Ctrl-C stops an answer, Ctrl-D leaves", MUTED)
    talk(conversation, options, console)
    messages = [
        {"role": message.role, "content": message.content} for message in conversation.messages
    ]
    return {"messages": messages, "model": loaded.source}


def talk(conversation: "Conversation", options: Namespace, console: Console) -> None:
    """Read messages from the terminal and answer them until the user leaves."""
    if readline:  # several pasted lines are one message
        readline.parse_and_bind("set enable-bracketed-paste on")
    was_interrupted = False
    while True:
        try:
            text = read_message().strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if was_interrupted:
                return
            was_interrupted = True
            console.print("press Ctrl-C again to leave", MUTED)
            continue
        was_interrupted = False
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
        elif re.fullmatch(r"/\w+", text):
            console.table(list(COMMANDS.items()))
        elif text:
            try:
                answer = ask(conversation, text, options, console)
                was_interrupted = answer.finish_reason == "interrupted"
            except ConfigError as error:
                console.print(f"error: {error}")


def ask(conversation: "Conversation", text: str, options: Namespace, console: Console) -> "Answer":
    """Answer a message. Without --json, print the answer as it is generated.

    Also prints a note if the answer was cut off.
    """
    n_dropped = conversation.dropped

    def write(part: str) -> None:
        if not options.json:
            sys.stdout.write(spell_controls(part) if console.is_live else part)
            sys.stdout.flush()

    answer = conversation.ask(text, write)
    write("\n")
    notes = Console(to_stderr=True)
    if conversation.dropped and not n_dropped:
        count = format_count(conversation.dropped, "message")
        notes.print(f"note: the context is full; dropped the oldest {count}", MUTED)
    if answer.finish_reason == "length":
        notes.print(f"note: cut after {format_count(len(answer.ids), 'token')}", MUTED)
    return answer


def read_message() -> str:
    """Read a message: one line, several pasted lines, or lines between QUOTES.

    Raises EOFError at the end of input.
    """
    lines = [input("> ")]
    with suppress(EOFError):  # raised again by the next call
        # Without readline's bracketed paste, the lines of a paste come one by one.
        while select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
            lines.append(input())
    text = "\n".join(lines)
    if text.startswith(QUOTES):
        while QUOTES not in text[len(QUOTES) :]:
            text += "\n" + input("... ")
        text = text[len(QUOTES) :].partition(QUOTES)[0]
    return text
