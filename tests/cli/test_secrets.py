"""No output and no file contains secrets of the environment, recipes, addresses or arguments."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest

from megatoken.base.errors import DataError, ExitCode
from megatoken.base.redact import RedactedStream, redact
from megatoken.convert.hf.export import write_hf
from megatoken.text.tokenizer import load_tokenizer
from tests.cli.canaries import VARIABLES, find_canaries, list_commands, write_inputs
from tests.conftest import Ask, Call
from tests.convert.models import draw_model


@pytest.mark.fault(53)
def test_no_secret_is_in_any_output_or_file(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, one_thread: None
):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path / "in")
    outputs, codes = [], []
    for command in list_commands():
        monkeypatch.setattr(sys, "argv", ["megatoken", *command])
        code, *printed = call(shlex.join(command))
        codes.append(code)
        outputs.append("".join(printed))
    assert find_canaries(outputs, tmp_path) == []
    failed = {number: outputs[number] for number, code in enumerate(codes) if code != ExitCode.DONE}
    assert list(failed) == list(range(9, len(codes))), failed
    facts = json.loads(Path("run/provenance.json").read_text())
    assert "evaluate.tasks_data=https://host/x?X-Amz-Signature=***&y=1" in facts["command"]
    for file in ("run/config.yaml", "job.sh"):
        assert "***" in Path(file).read_text()


def test_variables_are_secret_by_a_word_of_their_names(monkeypatch: pytest.MonkeyPatch):
    for name in ("DB_PASS", "AUTH", "MY_CREDENTIALS", "GITHUB_PAT", "WANDB_APIKEY"):
        monkeypatch.setenv(name, f"value-of-{name}")
        assert redact(f"prompt value-of-{name}") == "prompt ***", name
    for name in ("MONKEY", "MANPATH", "COMPASS"):
        monkeypatch.setenv(name, f"value-of-{name}")
        assert redact(f"prompt value-of-{name}") == f"prompt value-of-{name}"


PLAIN = """\
token 5: budget.tokens=1000, data.tokenizer=gpt2, 10,000 tokens/s
unknown key 'optim.lrr' — /home/me@work/r.yaml:3 — did you mean 'optim.lr'?
https://huggingface.co/gpt2/resolve/main/config.json?download=true
prepare x --text-key content --tokenizer bpe:4096
http://127.0.0.1:8080/a@b
self.token = tokenizer.next()
give --api-key, which clients must send, or leave --host out
the API key is empty — --api-key — use letters and digits
"""


@pytest.mark.parametrize("text", PLAIN.splitlines())
def test_other_text_stays(text: str):
    assert redact(text) == text


def test_values_of_secret_variables_are_hidden(monkeypatch: pytest.MonkeyPatch):
    secret = 'a"b\\c/d'
    monkeypatch.setenv("MY_KEY", secret)
    monkeypatch.setenv("OTHER_TOKEN", "yes")  # too short to be one
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallel")
    text = json.dumps([secret, f"x {secret}", "yes", "parallel"])
    assert redact(text) == '["***", "x ***", "yes", "parallel"]'
    assert str(DataError("no file", secret)) == "no file — ***"
    stream = io.StringIO()
    print(secret, file=RedactedStream(stream), flush=True)
    RedactedStream(stream).writelines([secret])
    assert stream.getvalue() == "***\n***"


def test_text_of_a_model_and_json_are_exact(
    tmp_path: Path, ask: Ask, call: Call, monkeypatch: pytest.MonkeyPatch, one_thread: None
):
    write_hf(tmp_path, draw_model(), load_tokenizer("bytes"), "fp32")
    prompt = "git clone ssh://git@host/x --token abc"
    line = f"sample {tmp_path} '{prompt}' --tokens 20 --temperature 0"
    [text] = ask(line)["text"]
    monkeypatch.setenv("MY_KEY", text)
    assert redact(text) == "***"
    assert ask(line)["text"] == [text]
    assert call(line)[:2] == (ExitCode.DONE, f"{prompt}{text}\n")
