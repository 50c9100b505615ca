"""`megatoken chat`: talk to a model in the terminal, or ask it once.

Answers are shown as they come. Nothing that is said is written to a file.
"""

import re
import select
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from megatoken.config.schema import MachineConfig
from megatoken.console import MUTED, Console, format_count, format_quantity, spell_controls
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.chat_template import Message, find_template
from megatoken.errors import ConfigError
from megatoken.model.flops import count_parameters
from megatoken.sampling.choose import Sampling
from megatoken.sampling.conversation import Answer, Conversation
from megatoken.sampling.generate import prepare_decoding
from megatoken.system.device import memory_errors, open_device

try:
    import readline
except ImportError:  # input() then has no history
    readline = None  # type: ignore[assignment]

PASTE_SECONDS = 0.05  # within which the next line of a pasted text comes
QUOTES = '"""'  # stands before and behind a message of several lines
COMMANDS = {
    "/clear": "forget what was said",
    "/exit": "leave, as Ctrl-D and a second Ctrl-C do",
    "/help": "what can be typed here",
}


@memory_errors("chat", "use --precision bf16 or --device cpu")
def chat(options: Namespace) -> dict[str, Any]:
    """Talk until the user leaves, or answer `--prompt` or what is piped in; return the last answer.

    Raises ConfigError for a model without a chat template, numbers out of range, or an empty prompt.
    """
    sampling = Sampling(
        options.tokens, options.temperature, options.top_k, options.top_p, options.seed
    )
    is_terminal = options.prompt is None and sys.stdin.isatty()
    if is_terminal and options.json:
        raise ConfigError(
            "--json has no conversation to print",
            "--json",
            "give a message: -p TEXT, or from a pipe",
        )
    text = options.prompt
    if text is None and not is_terminal:
        text = sys.stdin.buffer.read().decode(errors="replace").strip("\n")
    source = "standard input" if options.prompt is None else "--prompt"
    for flag, given in ((source, text), ("--system", options.system)):
        if given is not None and not given.strip():
            raise ConfigError("the text is empty", flag, "give some, or leave it out")
    loaded = load_pretrained(options.model, Console(to_stderr=True).warn)
    device = open_device(MachineConfig(device=options.device, precision=options.precision))
    template = find_template(loaded.tokenizer)
    prepare_decoding(loaded.model.to(device.torch_device), device)
    system = [Message("system", options.system)] if options.system else []
    conversation = Conversation(loaded.model, template, sampling, device, system)
    if text is not None:
        answer = ask(conversation, text, options)
        if answer.finish_reason == "interrupted":
            raise KeyboardInterrupt
        return {**asdict(answer), "model": loaded.source}
    size = format_quantity(count_parameters(loaded.model.config))
    about = f"{loaded.source}: {size} parameters, a context of {loaded.model.config.seq_len:,} tokens, {template.name}"
    options.console.print(about, MUTED)
    options.console.print(
        "/help for what can be typed; Ctrl-C stops an answer, Ctrl-D leaves", MUTED
    )
    talk(conversation, options)
    messages = [
        {"role": message.role, "content": message.content} for message in conversation.messages
    ]
    return {"messages": messages, "model": loaded.source}


def talk(conversation: Conversation, options: Namespace) -> None:
    """Read messages from the terminal and answer them until the user leaves."""
    if readline:
        readline.parse_and_bind(
            "set enable-bracketed-paste on"
        )  # several pasted lines are one message
    console, may_leave = options.console, False  # may_leave: by another Ctrl-C
    while True:
        try:
            text = read_message().strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if may_leave:
                return
            may_leave = True
            console.print("Ctrl-C once more leaves", MUTED)
            continue
        may_leave = False
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
        elif re.fullmatch(r"/\w+", text):
            if text != "/help":
                console.print(f"no command {text}", MUTED)
            console.table(
                [*COMMANDS.items(), (QUOTES, "before and behind a message of several lines")]
            )
        elif text:
            try:
                may_leave = ask(conversation, text, options).finish_reason == "interrupted"
            except ConfigError as error:
                console.print(f"error: {error}")


def ask(conversation: Conversation, text: str, options: Namespace) -> Answer:
    """Print the answer to a message while it comes, unless `--json`; say when old turns begin to be left out."""
    shown = (
        spell_controls if options.console.is_live else str
    )  # a file or pipe gets the text alone, as it is
    dropped = conversation.dropped

    def print_part(part: str) -> None:
        sys.stdout.write(shown(part))
        sys.stdout.flush()

    answer = conversation.ask(text, (lambda _: None) if options.json else print_part)
    if not options.json:
        print(flush=True)
    notes = Console(to_stderr=True)
    if conversation.dropped and not dropped:
        what = format_count(conversation.dropped, "message")
        notes.print(
            f"note: the context is full: the oldest {what} left out, and more from here on", MUTED
        )
    if answer.finish_reason == "length":
        notes.print(f"note: cut after {format_count(len(answer.ids), 'token')}", MUTED)
    return answer


def read_message() -> str:
    """A message from the terminal: a line, pasted lines, or lines between QUOTES. Raises EOFError at the end."""
    lines = [input("> ")]
    with suppress(EOFError):  # which comes again when the next message is read
        while select.select([sys.stdin], [], [], PASTE_SECONDS)[
            0
        ]:  # where readline does not take a paste whole
            lines.append(input())
    text = "\n".join(lines)
    if text.startswith(QUOTES):
        while QUOTES not in text[len(QUOTES) :]:
            text += "\n" + input("... ")
        text = text[len(QUOTES) :].partition(QUOTES)[0]
    return text
