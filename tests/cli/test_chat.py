"""`megatoken chat`: an answer on a pipe, a conversation in a terminal, a model without template."""

import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
import torch

from megatoken.base.errors import ExitCode
from megatoken.convert.hf.export import write_hf
from megatoken.distributed.local_launch import COMMAND
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import Message
from tests.conftest import Ask, Call
from tests.convert.models import TEMPLATE, byte_tokenizer, draw_chat_model, draw_model
from tests.processes import HANG_SECONDS, PROC, wait_until

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs pseudo-terminals")


@pytest.fixture(scope="module")
def model() -> GPT:
    """Return a model that never stops: its stop tokens are never the likeliest."""
    model = draw_chat_model(4096)
    with torch.no_grad():
        model.lm_head_weight[list(TEMPLATE.stop_ids)] = 0.0
    return model


@pytest.fixture(scope="module")
def folder(model: GPT, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_hf(folder, model, TEMPLATE.tokenizer, "fp32")
    return str(folder)


def test_one_answer_on_a_pipe(model: GPT, folder: str, ask: Ask, call: Call):
    line = f"chat {folder} -p Hi --system 'Be brief.' --tokens 6 --temperature 0"
    messages = [Message("system", "Be brief."), Message("user", "Hi")]
    sampling = Sampling(max_new_tokens=6, temperature=0)
    [ids] = generate_ids(model, TEMPLATE.encode(messages, reply=True)[0], sampling)
    assert call(line)[:2] == (ExitCode.DONE, TEMPLATE.tokenizer.decode(ids) + "\n")
    answer = ask(line)
    assert (answer["ids"], answer["finish_reason"], answer["model"]) == (ids, "length", folder)


WRONG = f"""\
FOLDER
FOLDER -p ' '
FOLDER -p x --system ''
FOLDER -p {"x" * 5000} --tokens 9
FOLDER -p x --chat-template-kwargs enable_thinking=false
PLAIN -p x
"""


@pytest.mark.parametrize("row", WRONG.splitlines())
def test_wrong_input(
    row: str, folder: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    """The first has an empty stdin, PLAIN has no template."""
    write_hf(tmp_path, draw_model(), byte_tokenizer(), "fp32")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    arguments = row.replace("FOLDER", folder).replace("PLAIN", str(tmp_path))
    assert call(f"chat {arguments}")[0] == ExitCode.CONFIG


class Terminal:
    """A process in a terminal of its own, which Ctrl-C reaches; `with` kills it at the end."""

    def __init__(self, command: Sequence[str], **variables: str) -> None:
        import pty

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # A job in the background begins with it ignored.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.environ |= {"TERM": "xterm", "NO_COLOR": "1"} | variables
            os.execv(command[0], command)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def read(self, until: str) -> str:
        """What it prints, up to and with `until`."""
        text = ""
        while until not in text:
            assert select.select([self.fd], [], [], HANG_SECONDS)[0], f"{text!r} without {until!r}"
            text += os.read(self.fd, 1).decode("latin1")
        return text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C when it waits for a key: between its prompt and that, readline misses it."""
        stat = PROC / str(self.pid) / "stat"
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")
        self.type("\x03")


@pytest.mark.long
@LINUX
def test_a_conversation_in_a_terminal(folder: str):
    pytest.importorskip("readline")
    arguments = f"chat {folder} --tokens 4000 --temperature 0"
    with Terminal([*COMMAND, *arguments.split()]) as terminal:
        assert "4,096 tokens" in terminal.read("> ")
        terminal.type("/help\n")
        assert "/clear" in terminal.read("> ")
        terminal.type("/nothing\n")
        assert "/clear" in terminal.read("> ")
        terminal.type("\x1b[200~one\ntwo\x1b[201~\n")  # pasted
        terminal.read("two")
        terminal.read("\xef")  # not text: the answer has begun
        terminal.type("\x03")  # within 4,000 tokens
        assert "> " not in terminal.read("^C")
        terminal.read("> ")  # the pasted lines were one message: no answer to the second one comes
        terminal.type("/clear\n")
        assert terminal.read("/clear") == "/clear"
        terminal.read("> ")
        terminal.interrupt()
        terminal.read("press Ctrl-C again")
        terminal.read("> ")
        terminal.interrupt()
        assert os.waitpid(terminal.pid, 0)[1] == 0
