"""The command line: output, JSON, exit codes, one-line errors."""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.cli import COMMANDS, load_command
from megatoken.cli.arguments import parse
from megatoken.cli.main import main
from megatoken.errors import ExitCode
from megatoken.launch.local import COMMAND
from megatoken.system.environment import python_command
from tests.conftest import Ask

LONG = "x" * 300  # longer than a file name may be
TINY = """model.n_layer=1 model.n_head=2 model.d_model=16 model.seq_len=32
    budget.batch_tokens=128 budget.steps=6 save.every=3 evaluate.every=3 sample.every=0
    machine.precision=fp32 machine.threads=1 machine.micro_batch=1"""


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        text = f"document {index}: " + "the cat sat on the mat. " * 30
        (folder / f"{index:02d}.txt").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "parameters", "full"),
    [
        ("gpt2-124m", 124_439_808, 854_438_400),
        ("gpt2-355m", 354_823_168, 2_422_708_224),
        ("gpt2-774m", 774_030_080, 5_198_937_600),
        ("gpt2-1558m", 1_557_611_200, 10_273_545_600),
        ("gpt3-175b", 174_604_259_328, 1_076_373_430_272),
        ("llama3.2-1b", 1_235_814_400, 58_954_088_448),
    ],
)
def test_describe(name: str, parameters: int, full: int, ask: Ask):
    answer = ask(f"describe {name}")
    assert (answer["parameters"], answer["flops_per_token_full"]) == (parameters, full)


def test_describe_counts_decayed_parameters_and_mfu(ask: Ask):
    """Published: 50 decayed tensors; 34.5% of fp32 and 2.3% of bf16 on an H100."""
    answer = ask("describe gpt2-124m --gpu H100 --rate 27026")
    assert (answer["decayed_parameters"], answer["other_parameters"]) == (124_354_560, 121_344)
    full = answer["mfu_full"]
    assert full["fp32"] == pytest.approx(0.3447, abs=5e-5)
    assert full["bf16"] == pytest.approx(0.0233, abs=5e-5)
    assert answer["mfu_causal"]["fp32"] == pytest.approx(full["fp32"] * 797_815_296 / 854_438_400)
    eight = ask("describe gpt2-124m --gpu 8xH100 --rate 3046409")["mfu_full"]
    assert eight["bf16"] == pytest.approx(0.33, abs=0.005)


def test_describe_follows_settings(ask: Ask):
    answer = ask("describe gpt2-124m model.d_model=384 model.n_layer=2")
    assert (answer["d_ff"], answer["n_layer"], answer["vocab_size"]) == (1536, 2, 50257)
    assert (answer["positions"], answer["tied"]) == ("learned", True)  # keys of --json


def test_describe_takes_the_vocabulary_of_the_data_or_the_preset(tmp_path: Path, ask: Ask):
    (tmp_path / "manifest.json").write_text('{"tokenizer": {"vocab_size": 257}}')
    for words, vocab_size in (
        ("llama-110m model.vocab_size=0", 32_000),
        ("quickstart data.path=data/of/others", 50_257),
        (f"quickstart data.path={tmp_path}", 257),
    ):
        assert ask(f"describe {words}")["vocab_size"] == vocab_size


def test_config_has_origins(ask: Ask):
    answer = ask("config quickstart optim.lr=1e-3")
    assert answer["origins"]["optim.lr"] == "command line"


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_overview_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(*words, capsys=capsys)
    names = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert code == 0
    assert [name for name in names if name in COMMANDS] == list(COMMANDS)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_an_example_that_parses(
    name: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    example = load_command(name).EXAMPLE
    assert example in capsys.readouterr().out
    words = shlex.split(example.removeprefix('eval "$(').removesuffix(')"'))
    assert parse(words[1:]).command == name


@pytest.mark.parametrize(
    ("words", "name"), [("reproduce notebook-fify", "notebook-fifty"), ("bench laddr", "ladder")]
)
def test_a_close_name_is_suggested(words: str, name: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(*words.split(), capsys=capsys)
    assert code == ExitCode.CONFIG
    assert name in err
    assert "notebook-gpt3" not in err


ERRORS = f"""
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
"""


@pytest.mark.parametrize("row", ERRORS.strip().splitlines())
def test_errors_are_one_line_and_an_exit_code(
    row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    code, *words = shlex.split(row)
    exit_code, out, err = run(*words, capsys=capsys)
    assert (exit_code, out) == (int(code), ""), err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "an error leaves no files"


def test_help_and_errors_load_neither_torch_nor_numpy(tmp_path: Path):
    program = (
        "import sys; from megatoken.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(str({'torch', 'numpy'} & {*sys.modules}) if 'numpy' in sys.modules else code)"
    )
    for words, code in (
        (["--help"], 0),
        (["--version"], 0),
        (["train", "quickstart", "optim.lrr=1"], ExitCode.CONFIG),
        (["sample"], ExitCode.CONFIG),
        (["plan", "gpt3-1.3b", "--gpus", "8xA100-40GB"], 0),
        (["runs"], 0),
    ):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("name", ["nowhere[/v2]", "[red]x"])
def test_words_of_users_are_not_markup(name: str, capsys: pytest.CaptureFixture[str]):
    for words in (["train", name], ["sample", name, name], ["verify", name], ["describe", name]):
        assert name in run(*words, capsys=capsys)[2]


def test_closed_streams_are_no_failure(corpus: Path, tmp_path: Path):
    words = [*COMMAND, "prepare", str(corpus), "--tokenizer", "bytes", "--out"]
    for redirection in ("| true", ">&-", "<&-", "2>&-"):
        line = f"{shlex.join([*words, str(tmp_path / redirection)])} {redirection}"
        program = f"{line}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_stdout_cannot_encode_is_replaced():
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = ["launch", "slurm", "quickstart", "--nproc", "2", "data.path=naïve"]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr, "data.path=na?ve" in done.stdout) == (0, "", True)


def test_no_file_of_the_current_folder_is_imported(tmp_path: Path):
    names = "json torch numpy re xxhash tokenizers yaml argparse pickle signal"
    for name in names.split():
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    (tmp_path / "text.txt").write_text("words " * 100)
    prepare = (
        "import sys; sys.path.append('.'); import megatoken.data.prepare as p; p.WORKER_BYTES = 1; "
        "p.prepare('text.txt', 'out', tokenizer='bytes', workers=2)"
    )
    for program in ([prepare], python_command("import json, re, xxhash")[2:]):
        subprocess.run([sys.executable, "-P", "-c", *program[-1:]], cwd=tmp_path, check=True)
        assert not (tmp_path / "canary").exists()
    (tmp_path / "re.py").unlink()  # python -m needs it before any line of ours
    for words in ([], ["-P"]):
        command = [sys.executable, *words, "-m", "megatoken", "verify", "out"]
        assert subprocess.run(command, cwd=tmp_path).returncode == 0
    assert COMMAND[:-1] == python_command("")[:-1]
    assert subprocess.run([*COMMAND, "describe", "gpt2-124m"], cwd=tmp_path).returncode == 0
    assert not (tmp_path / "canary").exists()


def test_a_dataset_or_text_is_no_model(corpus: Path, capsys: pytest.CaptureFixture[str]):
    data = str(corpus.parent / "my [data]")
    words = ["prepare", str(corpus), "--out", data, "--tokenizer", "bytes"]
    code, out, err = run(*words, capsys=capsys)
    assert (code, err, data in out) == (0, "", True)
    for name in (data, str(corpus)):
        code, _, err = run("sample", name, "x", capsys=capsys)
        assert (code, name in err) == (ExitCode.CHECKPOINT, True)


def test_prepare_train_sample_verify_plot(
    corpus: Path,
    tmp_path: Path,
    ask: Ask,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    data, out = f"{tmp_path}/data", f"{tmp_path}/run"
    prepared = ask(f"prepare {corpus} --out {data} --tokenizer bpe:300 --workers 1")
    assert (prepared["documents"], prepared["shards"]) == (20, 2)
    summary = ask(f"train {TINY} quickstart --out {out} data.path={data}")
    assert (summary["steps"], summary["tokens"], summary["code"]) == (6, 768, 0)
    greedy = f"sample {out} --tokens 12 'the cat' --temperature 0 --seed 1"
    first = ask(greedy)
    assert ask(greedy) == first
    assert [len(ids) for ids in first["ids"]] == [12]
    assert run(*shlex.split(greedy), capsys=capsys)[1] == f"the cat{first['text'][0]}\n"
    samples = ask(f"{greedy} 'a dog'")["samples"]
    assert samples == [first, ask(greedy.replace("the cat", "a dog"))]
    texts = [f"the cat{first['text'][0]}", f"a dog{samples[1]['text'][0]}"]
    printed = run(*shlex.split(f"{greedy} 'a dog'"), capsys=capsys)[1]
    assert printed == f"\n{'-' * 40}\n".join(texts) + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((corpus / "00.txt").read_bytes())))
    code, text, err = run("sample", out, "--tokens", "4", "-n", "2", capsys=capsys)
    assert (code, text.startswith("document 0: the cat"), err.count("\n")) == (0, True, 1)
    for words, expected in (
        (["verify", data], ExitCode.DONE),
        (["verify", out], ExitCode.DONE),
        (["sample", out, "the cat", "--tokens", "40"], ExitCode.DONE),
        (["sample", out, "\udcff", "--tokens", "2"], ExitCode.DONE),
        (["sample", out, "the cat", "--device", "abacus"], ExitCode.CONFIG),
    ):
        assert run(*words, capsys=capsys)[0] == expected, words
    shard = tmp_path / "data" / "train_000000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[2000] ^= 1
    shard.write_bytes(damaged)
    code, text, _ = run("verify", data, capsys=capsys)
    assert (code, shard.name in text) == (ExitCode.DATA, True)


def test_settings_and_options_mix_with_positional_words():
    options = parse(shlex.split("train optim.lr=1 --out o quickstart save.every=2 --init a.b=c"))
    assert (options.recipe, options.init) == ("quickstart", "a.b=c")
    assert options.overrides == ["optim.lr=1", "save.every=2"]
    assert parse(shlex.split("train --llmc '-i a -o b' optim.lr=1")).llmc == "-i a -o b"
    assert parse(shlex.split("sample --tokens 5 run hello --seed 1")).prompts == ["hello"]
    assert parse(shlex.split("sample run a --tokens 5 b")).prompts == ["a", "b"]
    assert parse(shlex.split("sample run --tokens 5")).prompts == ["-"]
    assert parse(shlex.split("plot a --x seconds b")).runs == [Path("a"), Path("b")]
    options = parse(shlex.split("race a 'b c.d=e' f.g=h"))
    assert (options.contenders, options.overrides) == (["a", "b c.d=e"], ["f.g=h"])


def test_home_is_expanded_after_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    assert main(["prepare", "~/text.txt", "--tokenizer", "bytes", "--out=~/data"]) == 0
    for name, data in ("run", "~/data"), ("mixed", "~/data:0.5,~/data:0.5"):
        words = ["train", "quickstart", f"data.path={data}", f"--out=~/{name}", *TINY.split()]
        assert main([*words, "budget.steps=1"]) == 0
    assert (tmp_path / "run" / "config.yaml").is_file()
    assert parse(["train", "finetune", "--init=~/run"]).init == f"{tmp_path}/run"
    assert not list(Path().iterdir())
