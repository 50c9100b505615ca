"""The command line: output, JSON, exit codes, one-line errors."""

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.base.errors import ExitCode
from megatoken.base.system.environment import python_command
from megatoken.cli import COMMANDS, load_command
from megatoken.cli.arguments import parse
from megatoken.cli.main import main
from megatoken.distributed.local_launch import COMMAND
from tests.conftest import Ask, Call

LONG = "x" * 300  # longer than a file name may be
TINY = """model.n_layer=1 model.n_head=2 model.d_model=16 model.seq_len=32
    budget.batch_tokens=128 budget.steps=6 save.every=3 evaluate.every=3 sample.every=0
    machine.precision=fp32 machine.threads=1 machine.micro_batch=1"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        text = f"document {index}: " + "the cat sat on the mat. " * 30
        (folder / f"{index:02d}.txt").write_text(text)
    return folder


# HERE: a dataset of 257 tokens.
DESCRIBED = """\
gpt2-124m => {"parameters": 124439808, "decayed_parameters": 124354560, "other_parameters": 121344}
gpt2-124m => {"flops_per_token_full": 854438400}
gpt3-175b => {"parameters": 174604259328, "flops_per_token_full": 1076373430272}
gpt2-124m model.d_model=384 model.n_layer=2 => {"d_ff": 1536, "n_layer": 2, "vocab_size": 50257}
gpt2-124m model.d_model=384 => {"positions": "learned", "tied": true}
llama-110m model.vocab_size=0 => {"vocab_size": 32000}
quickstart data.path=data/of/others => {"vocab_size": 50257}
quickstart data.path=HERE => {"vocab_size": 257}
"""


@pytest.mark.parametrize("row", DESCRIBED.splitlines())
def test_describe(row: str, tmp_path: Path, ask: Ask):
    (tmp_path / "manifest.json").write_text('{"tokenizer": {"vocab_size": 257}}')
    arguments, expected = row.replace("HERE", str(tmp_path)).split(" => ")
    assert json.loads(expected).items() <= ask(f"describe {arguments}").items()


def test_describe_computes_mfu(ask: Ask):
    """Published: 34.5% of fp32 and 2.3% of bf16 on an H100."""
    full = ask("describe gpt2-124m --gpu H100 --rate 27026")["mfu_full"]
    assert full["fp32"] == pytest.approx(0.3447, abs=5e-5)
    assert full["bf16"] == pytest.approx(0.0233, abs=5e-5)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    example = load_command(name).EXAMPLE
    assert example in capsys.readouterr().out
    arguments = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
    assert parse(arguments[1:]).command == name


ERRORS = f"""\
2 train quickstart optim.lrr=1
2 train nope
2 train
2 train quickstart more
2 train quickstart --composer x
2 train quickstart --outt x
3 train quickstart data.path=/no/folder
2 train quickstart data.path=nothing://b/data
3 train quickstart data.path=x/**foo*.bin
2 train quickstart machine.threads=100000
2 train quickstart --nproc 0
2 train quickstart --init a model.init=b
2 train quickstart --extend soon
2 train sft
2 train runs/nope
2 train quickstart --out s3://bucket/run
3 train quickstart data.path={LONG}
5 train quickstart --out {LONG} data.path=NO
2 train {LONG}/x.yaml
3 prepare /no/file.txt --out OUT
2 prepare python --out ''
2 prepare python --out nothing://bucket/out
5 prepare {LONG} --out OUT
4 sample /no/run hello
4 sample runs/nope a
2 sample /no/run x --tokens 0
2 sample /no/run x --top-k -1
2 sample /no/run x --top-p 0
2 sample /no/run x --temperature nan
5 sample {LONG} hello
4 eval runs/nope --tasks hellaswag
5 eval {LONG} --data {LONG}
4 export runs/nope --out x
2 export run --out x --to onnx
2 export run --out s3://bucket/run
5 export {LONG} --out OUT
3 verify /no/folder
3 verify .
2 verify nothing://bucket/out
5 verify {LONG}
3 plot runs/nope
5 plot {LONG}
5 consolidate {LONG} --out OUT
2 frobnicate
2 quickstart --data ''
2 launch slurm quickstart --out s3://bucket/run
5 launch slurm quickstart --nproc 2 --write {LONG}
2 bench
2 bench parts --preset nope
2 bench ladder --out . --name a/b
5 bench ladder --out {LONG}
3 runs missing
4 serve /no/such/run
2 plan gpt2-124m
2 plan gpt2-124m --gpus 8xA10000
2 plan gpt2-124m --gpus 7xH100
2 plan gpt2-124m --gpus 8xH100 --price nan
2 plan gpt2-124m --gpus 8xH100 --budget 0.01
2 plan gpt2-124m --gpus 8xH100 --law fitted --budget 1e-9
2 plan gpt2-124m --gpus 8xT4 --budget 5
2 plan gpt2-124m --gpus 8xH100 --deadline 5
2 plan gpt2-124m --gpus 8xH100 --tokens 0
2 plan gpt2-124m --gpus 8xH100 --plot plan.foo
2 plan gpt2-124m --gpus 8xH100 budget.epochs=1 --deadline 1h
2 plan gpt3-125m --gpus 1xT4 --price 1 --budget 5 machine.micro_batch=256
2 plan --gpus 8xH100 --budget 5000
2 plan gpt3-175b --gpus 1000xH100
2 dryrun gpt2-124m --gpu h1000
2 dryrun gpt2-124m --gpus 0
2 dryrun gpt2-124m --gpus 7
2 dryrun gpt2-124m --gpus 8 --tp 5
2 dryrun gpt2-124m machine.micro_batch=3
"""


@pytest.mark.parametrize("row", ERRORS.splitlines())
def test_errors_are_one_line_and_an_exit_code(
    row: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    expected, line = row.split(maxsplit=1)
    code, out, error = call(line)
    assert (code, out) == (int(expected), ""), error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "an error leaves no files"


def test_help_and_errors_load_neither_torch_nor_numpy(tmp_path: Path):
    lines = {"--help": 0, "--version": 0, "train quickstart optim.lrr=1": 2, "sample": 2, "runs": 0}
    lines["plan gpt3-1.3b --gpus 8xA100-40GB"] = 0
    program = (
        "import sys; from megatoken.cli.main import main; "
        "codes = [int(main(line.split())) for line in sys.argv[1:]]; "
        "sys.exit(str((codes, {'torch', 'numpy'} & {*sys.modules})))"
    )
    command = [sys.executable, "-c", program, *lines]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == str(([*lines.values()], set()))


@pytest.mark.parametrize("name", ["nowhere[/v2]", "[red]x"])
def test_words_of_users_are_not_markup(name: str, call: Call):
    for arguments in (f"train {name}", f"sample {name} x", f"verify {name}", f"describe {name}"):
        assert name in call(arguments)[2]


def test_closed_streams_are_no_failure(corpus: Path, tmp_path: Path):
    arguments = [*COMMAND, "prepare", str(corpus), "--tokenizer", "bytes", "--out"]
    for redirection in ("| true", ">&-", "<&-", "2>&-"):
        line = f"{shlex.join([*arguments, str(tmp_path / redirection)])} {redirection}"
        program = f"{line}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_stdout_cannot_encode_is_replaced():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = ["launch", "slurm", "quickstart", "--nproc", "2", "data.path=naïve"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr, "data.path=na?ve" in done.stdout) == (0, "", True)


def test_no_file_of_the_current_folder_is_imported(tmp_path: Path):
    def run(*command):
        subprocess.run(command, cwd=tmp_path, check=True)
        assert not (tmp_path / "canary").exists()

    names = "json torch numpy re xxhash tokenizers yaml argparse pickle signal"
    for name in names.split():
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    (tmp_path / "text.txt").write_text("words " * 100)
    prepare = (
        "import sys; sys.path.append('.'); import megatoken.text.prepare as p; p.WORKER_BYTES = 1; "
        "p.prepare('text.txt', 'out', tokenizer='bytes', workers=2)"
    )
    for program in (prepare, python_command("import json, re, xxhash")[-1]):
        run(sys.executable, "-P", "-c", program)
    (tmp_path / "re.py").unlink()  # python -m needs it before any line of ours
    for arguments in ([], ["-P"]):
        run(sys.executable, *arguments, "-m", "megatoken", "verify", "out")
    assert COMMAND[:-1] == python_command("")[:-1]
    run(*COMMAND, "describe", "gpt2-124m")


def test_prepare_train_sample_verify(
    corpus: Path, tmp_path: Path, ask: Ask, call: Call, monkeypatch: pytest.MonkeyPatch
):
    data, out = f"{tmp_path}/my [data]", f"{tmp_path}/run"
    prepared = ask(f"prepare {corpus} --out '{data}' --tokenizer bpe:300 --workers 1")
    assert (prepared["documents"], prepared["shards"]) == (20, 2)
    summary = ask(f"train {TINY} quickstart --out {out} 'data.path={data}'")
    assert (summary["steps"], summary["tokens"], summary["code"]) == (6, 768, 0)
    sample = f"sample {out} --tokens 12 --temperature 0 --seed 1"
    first, second = (ask(f"{sample} '{prompt}'") for prompt in ("the cat", "a dog"))
    assert [len(ids) for ids in first["ids"]] == [12]
    assert ask(f"{sample} 'the cat' 'a dog'")["samples"] == [first, second]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((corpus / "00.txt").read_bytes())))
    code, text, error = call(f"sample {out} --tokens 4 -n 2")
    assert (code, text.startswith("document 0: the cat"), error.count("\n")) == (0, True, 1)
    codes = {
        f"verify {out}": ExitCode.DONE,
        f"sample {out} 'the cat' --tokens 40": ExitCode.DONE,
        f"sample {out} \udcff --tokens 2": ExitCode.DONE,
        f"sample {out} 'the cat' --device abacus": ExitCode.CONFIG,
        f"sample '{data}' x": ExitCode.CHECKPOINT,  # a dataset and a text are not models
        f"sample {corpus} x": ExitCode.CHECKPOINT,
    }
    assert {line: call(line)[0] for line in codes} == codes
    code, text, error = call(f"verify '{data}'")
    assert (code, data in text, error) == (ExitCode.DONE, True, "")
    shard = Path(data) / "train_000000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[2000] ^= 1
    shard.write_bytes(damaged)
    code, text, _ = call(f"verify '{data}'")
    assert (code, shard.name in text) == (ExitCode.DATA, True)


PARSED = """\
train optim.lr=1 --out o quickstart save.every=2 => {"recipe": "quickstart", "overrides": ["optim.lr=1", "save.every=2"]}
train quickstart --init a.b=c => {"init": "a.b=c", "overrides": []}
race a 'b c.d=e' f.g=h => {"contenders": ["a", "b c.d=e"], "overrides": ["f.g=h"]}
train --llmc '-i a -o b' optim.lr=1 => {"llmc": "-i a -o b", "overrides": ["optim.lr=1"]}
sample --tokens 5 run hello --seed 1 => {"prompts": ["hello"]}
sample run a --tokens 5 b => {"prompts": ["a", "b"]}
sample run --tokens 5 => {"prompts": ["-"]}
plot a --x seconds b => {"runs": ["a", "b"]}
"""


@pytest.mark.parametrize("row", PARSED.splitlines())
def test_settings_and_options_mix_with_positional_words(row: str):
    line, expected = row.split(" => ")
    options = json.loads(json.dumps(vars(parse(shlex.split(line))), default=str))
    assert options | json.loads(expected) == options


def test_home_is_expanded_after_an_equals_sign(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    assert call("prepare ~/text.txt --tokenizer bytes --out=~/data")[0] == 0
    for name, data in ("run", "~/data"), ("mixed", "~/data:0.5,~/data:0.5"):
        line = f"train quickstart data.path={data} --out=~/{name} {TINY} budget.steps=1"
        assert call(line)[0] == 0
    assert (tmp_path / "run/config.yaml").is_file()
    assert parse(["train", "finetune", "--init=~/run"]).init == f"{tmp_path}/run"
    assert not list(Path().iterdir())
