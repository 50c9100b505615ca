"""The command line: output, JSON, exit codes, one-line errors."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatoken.bench.main import BENCHES
from megatoken.cli.arguments import parse
from megatoken.cli.help import EXAMPLES
from megatoken.cli.main import COMMANDS, main
from megatoken.errors import ConfigError, ExitCode
from megatoken.launch.local import COMMAND
from megatoken.system.environment import python_command

LONG = "x" * 300  # longer than a name may be


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def run_json(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    code, out, err = run(*words, "--json", capsys=capsys)
    assert code == 0, err
    answer = json.loads(out.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index:02d}.txt").write_text(
            f"document {index}: " + "the cat sat on the mat. " * 30
        )
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
def test_describe(
    name: str, parameters: int, full: int, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = run_json("describe", name, capsys=capsys)
    assert answer["parameters"] == parameters
    assert answer["flops_per_token_full"] == full
    assert run("describe", name, capsys=capsys)[1].count("\n") == 9


def test_describe_follows_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_json(
        "describe", "gpt2-124m", "model.d_model=384", "model.n_layer=2", capsys=capsys
    )
    assert (answer["d_ff"], answer["n_layer"], answer["vocab_size"]) == (1536, 2, 50257)
    assert (answer["positions"], answer["tied"]) == (
        "learned",
        True,
    )  # keys of --json keep the names of old versions


def test_describe_assumes_the_vocabulary_of_the_data_or_the_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run("describe", "llama-110m", "model.vocab_size=0", capsys=capsys)[1]
    assert (
        "32,000 ids, padded to 32,000 (the recipe leaves it to the tokenizer: the preset's assumed)"
        in text
    )
    text = run("describe", "quickstart", "data.path=data/of/others", capsys=capsys)[1]
    assert (
        "50,257 ids, padded to 50,304 (the recipe leaves it to the tokenizer: GPT-2's assumed)"
        in text
    )
    (tmp_path / "manifest.json").write_text('{"tokenizer": {"vocab_size": 257}}')
    text = run("describe", "quickstart", f"data.path={tmp_path}", capsys=capsys)[1]
    assert (
        f"257 ids, padded to 384 (the recipe leaves it to the tokenizer: that of {tmp_path})"
        in text
    )
    text = run("describe", "llama3-8b", capsys=capsys)[1]
    assert "32 layers, 32 heads (8 key/value), width 4,096" in text
    assert (
        "rmsnorm, swiglu of 14,336, rotary positions, heads of 128, no biases, output layer of its own"
        in text
    )


def test_config_prints_values_with_origins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("config", "quickstart", "optim.lr=1e-3", capsys=capsys)
    assert code == 0
    assert "  lr: 0.001                                   # command line" in out
    answer = run_json("config", "quickstart", "optim.lr=1e-3", capsys=capsys)
    assert answer["origins"]["optim.lr"] == "command line"  # type: ignore[index]


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_shows_every_command_once_in_its_group(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(words)
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 100] == []
    assert sorted(re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)) == sorted(COMMANDS)
    assert text.count("\n  megatoken ") == 5


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_ends_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([command, "--help"])
    assert f"example:\n  {EXAMPLES[command]}\n" in capsys.readouterr().out
    program, *words = shlex.split(EXAMPLES[command].removeprefix('eval "$(').removesuffix(')"'))
    assert program == "megatoken"
    assert parse(words, COMMANDS).command == command


@pytest.mark.parametrize("columns", ["", "80", "120"])  # empty: a pipe
@pytest.mark.parametrize("command", ["", *COMMANDS, *(f"bench {name}" for name in BENCHES)])
def test_help_fits_the_terminal(
    command: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > int(columns or 80)] == []
    assert not [line for line in lines if line.endswith(("modern-", "gpt2-", "section."))], (
        "a broken name"
    )


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["train", "--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "optim.lr=0.0006",
        "budget.batch_tokens=524288",
        "[tokens]",
        "{auto, fp32, bf16, fp16}",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (
            ["train", "quickstart", "optim.lrr=1"],
            2,
            "unknown key 'optim.lrr' — command line — did you mean 'optim.lr'?",
        ),
        (["train", "nope"], 2, "no recipe named 'nope'"),
        (
            ["train", "quickstart", "--outt", "x"],
            2,
            "unrecognized arguments: --outt x — megatoken train — did you mean --out?",
        ),
        (["train", "quickstart", "machine.device=cuda"], 2, "no CUDA device for 'cuda': 0 found"),
        (["train", "quickstart", "data.path=/no/such/folder"], 3, "/no/such/folder"),
        (["prepare", "/no/such/file.txt", "--out", "OUT"], 3, "/no/such/file.txt"),
        (["sample", "/no/such/run", "hello"], 4, "/no/such/run"),
        (["verify", "/no/such/folder"], 3, "/no/such/folder"),
        (
            ["verify", "."],
            3,
            "neither a dataset nor a run — . — name a dataset, a run or one of its checkpoints",
        ),
        (["plot", "/no/such/run"], 3, "/no/such/run"),
        (["frobnicate"], 2, "no command 'frobnicate'"),
        (["trian", "quickstart"], 2, "did you mean train?"),
        (
            ["sample", "/no/such/run", "x", "--tokens", "0"],
            2,
            "--tokens is 0 — sampling — give 1 or more",
        ),
        (
            ["sample", "/no/such/run", "x", "--top-k", "-1"],
            2,
            "--top-k is -1 — sampling — give 0 (all) or more",
        ),
        (["bench", "ladder", "--out", ".", "--name", "a/b"], 2, "--name: 'a/b' is not a file name"),
        (["train", "quickstart", "machine.threads=100000"], 2, "at most 1024"),
        (["train", "runs/nope"], 2, "no recipe named 'runs/nope'"),
        *(
            (words, 4, "no such folder — runs/nope — give a run folder")
            for words in (
                ["sample", "runs/nope", "a"],
                ["eval", "runs/nope", "--tasks", "hellaswag"],
                ["export", "runs/nope", "--out", "x"],
            )
        ),
        (
            ["plot", "runs/nope"],
            3,
            "no metrics to read: No such file or directory — runs/nope/metrics.jsonl — ",
        ),
        (
            ["prepare", "a.txt", "--root", "x", "--out", "OUT"],
            2,
            "--root has no effect beside a.txt",
        ),
        (["prepare", "python", "--out", ""], 2, "a path is empty"),
        (
            ["prepare", "python", "--out", "nothing://bucket/out"],
            2,
            "not an address: Protocol not known: nothing",
        ),
        (
            ["prepare", "python", "--out", "file:/out"],
            2,
            "not a path on this machine: file:/out — mount",
        ),
        (["verify", "nothing://bucket/out"], 2, "not an address: Protocol not known: nothing"),
        (["train", "quickstart", "--out", "s3://bucket/run"], 2, "not a path on this machine"),
        (["train", "quickstart", "--out", "s3:bucket/run"], 2, "not a path on this machine"),
        (
            ["prepare", "python", "--out", "s3:bucket"],
            2,
            "not a path on this machine: s3:bucket — mount it",
        ),
        (["quickstart", "--data", ""], 2, "--data is empty — --data — name a text"),
        (["bench", "knob", "machine.nope", "--out", "."], 2, "no machine setting 'machine.nope'"),
        (["bench", "knob", "machine.shard", "--out", "."], 2, "no machine setting 'machine.shard'"),
        (
            ["bench", "batch", "--preset", "nope"],
            2,
            "known: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, gpt3-125m,",
        ),
        (["quickstart", "--out", "gs://bucket/run"], 2, "not a path on this machine"),
        (
            ["launch", "slurm", "quickstart", "--out", "s3://bucket/run"],
            2,
            "not a path on this machine",
        ),
        (["bench", "ladder", "--out", "s3://bucket/run"], 2, "not a path on this machine"),
        (["export", "run", "--out", "s3://bucket/run"], 2, "not a path on this machine"),
        (
            ["train", "quickstart", "data.path=nothing://bucket/data"],
            2,
            "not an address: Protocol not known: nothing",
        ),
        (["train", "quickstart", "data.path=x/**foo*.bin"], 3, "x/**foo*.bin"),
        (["verify", LONG], 5, "File name too long"),
        (["prepare", LONG, "--out", "OUT"], 5, "File name too long"),
        (["sample", LONG, "hello"], 5, "File name too long"),
        (["train", "quickstart", f"data.path={LONG}"], 3, "File name too long"),
        (["train", "quickstart", "--out", LONG, "data.path=NOWHERE"], 5, "File name too long"),
        (["plot", LONG], 5, "File name too long"),
        (["bench", "ladder", "--out", LONG], 5, "File name too long"),
        (["consolidate", LONG, "--out", "OUT"], 5, "File name too long"),
        (["eval", LONG, "--data", LONG], 5, "File name too long"),
        (["export", LONG, "--out", "OUT"], 5, "File name too long"),
        (
            ["launch", "slurm", "quickstart", "--nproc", "2", "--write", LONG],
            5,
            "File name too long",
        ),
        (["train", LONG + "/x.yaml"], 2, "no recipe named"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "machine.device=cuda" in words:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
    found, out, err = run(*words, capsys=capsys)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def test_a_typo_costs_no_time(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "megatoken", "train", "quickstart", "optim.lrr=1"]
    before = os.times()
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == ExitCode.CONFIG
    after = os.times()  # of the processor: a busy machine may take longer
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 1
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["nowhere[/v2]", "[red]x"])
def test_words_of_users_are_not_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", name],
        ["sample", name, name],
        ["verify", name],
        ["plot", name],
        ["describe", name],
    ):
        assert name in run(*words, capsys=capsys)[2]


def test_a_reader_that_leaves_is_no_failure(corpus: Path, tmp_path: Path) -> None:
    words = [*COMMAND, "prepare", str(corpus), "--tokenizer", "bytes", "--out"]
    for redirection in ("| true", ">&-", "<&-", "2>&-"):
        line = f"{shlex.join([*words, str(tmp_path / redirection)])} {redirection}; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_what_stdout_cannot_encode_is_replaced() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    words = ["launch", "slurm", "quickstart", "--nproc", "2", "data.path=naïve"]
    done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr, "data.path=na?ve" in done.stdout) == (0, "", True)


NAMES = (
    "json",
    "torch",
    "numpy",
    "re",
    "xxhash",
    "tokenizers",
    "yaml",
    "argparse",
    "pickle",
    "signal",
)
FOLDER_FIRST = (
    "import sys; sys.path.append('.'); import megatoken.data.prepare as p; p.WORKER_BYTES = 1; "
)


def test_no_file_of_the_current_folder_is_imported(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    (tmp_path / "text.txt").write_text("words " * 100)
    prepare = FOLDER_FIRST + "p.prepare('text.txt', 'out', tokenizer='bytes', workers=2)"
    for program in ([prepare], python_command("import json, re, xxhash")[2:]):
        subprocess.run([sys.executable, "-P", "-c", *program[-1:]], cwd=tmp_path, check=True)
        assert not (tmp_path / "canary").exists()
    (tmp_path / "re.py").unlink()  # Python itself needs it for -m, before any line of ours
    for words in ([], ["-P"]):
        done = subprocess.run(
            [sys.executable, *words, "-m", "megatoken", "verify", "out"], cwd=tmp_path
        )
        assert done.returncode == 0
    assert COMMAND[:-1] == python_command("")[:-1]
    done = subprocess.run([*COMMAND, "describe", "gpt2-124m"], cwd=tmp_path)
    assert done.returncode == 0
    assert not (tmp_path / "canary").exists()


def test_a_path_is_not_parsed_as_markup(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a[" / "b]"
    code, text, err = run(
        "prepare", str(corpus), "--out", str(out), "--tokenizer", "bytes", capsys=capsys
    )
    assert (code, err) == (0, "")
    assert f"dataset: {out}; next" in text


def test_a_model_that_is_text_or_a_dataset_is_called_so(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    code, text, _ = run(
        "prepare", "corpus", "--out", "my data", "--tokenizer", "bytes", capsys=capsys
    )
    assert (code, text.rpartition("next: ")[2]) == (
        0,
        "megatoken train RECIPE 'data.path=my data'\n",
    )
    for name, message in (
        (
            "my data",
            "a dataset, not a model — my data — train one on it: megatoken train RECIPE 'data.path=my data'",
        ),
        (
            "corpus",
            "text, not a model — corpus — train one on it: megatoken quickstart --data corpus",
        ),
    ):
        assert run("sample", name, "x", capsys=capsys) == (4, "", f"error: {message}\n")


def test_prepare_train_sample_verify_plot(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, out = tmp_path / "data", tmp_path / "run"
    prepared = run_json(
        "prepare",
        str(corpus),
        "--out",
        str(data),
        "--tokenizer",
        "bpe:300",
        "--workers",
        "1",
        capsys=capsys,
    )
    assert prepared["documents"] == 20
    assert prepared["shards"] == 2
    assert isinstance(prepared["tokens"], int)
    assert run("verify", str(data), capsys=capsys)[0] == 0
    small = [
        "model.n_layer=1",
        "model.n_head=2",
        "model.d_model=16",
        "model.seq_len=32",
        "budget.batch_tokens=128",
    ]
    small += [
        "budget.steps=6",
        "save.every=3",
        "evaluate.every=3",
        "sample.every=0",
        "machine.precision=fp32",
    ]
    words = ["train", "quickstart", *small, "--out", str(out), f"data.path={data}"]
    code, text, err = run(*words, "--json", capsys=capsys)
    assert code == 0, err
    summary = json.loads(text.splitlines()[-1])
    assert (summary["steps"], summary["tokens"], summary["code"]) == (6, 768, 0)
    assert (out / "plots" / "curves.png").read_bytes().startswith(b"\x89PNG")
    greedy = ["sample", str(out), "the cat", "--tokens", "12", "--temperature", "0", "--seed", "1"]
    first, second = (run_json(*greedy, capsys=capsys) for _ in range(2))
    assert first == second
    assert len(first["ids"]) == 1  # type: ignore[arg-type]
    assert len(first["ids"][0]) == 12  # type: ignore[index]
    streamed = run(*greedy, capsys=capsys)[1]
    assert streamed == "the cat" + first["text"][0] + "\n"  # type: ignore[index]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((corpus / "00.txt").read_bytes())))
    code, text, err = run("sample", str(out), "--tokens", "4", "-n", "2", capsys=capsys)
    assert (code, text.startswith("document 0: the cat")) == (0, True)
    assert re.fullmatch(
        r"note: the prompt has \d+ tokens, the model sees the last 32: its context\n", err
    )
    code, _, err = run("sample", str(out), "the cat", "--tokens", "40", capsys=capsys)
    assert (code, err) == (
        0,
        "note: beyond the context of 32 tokens the model sees the newest ones only\n",
    )
    several = run_json("sample", str(out), "the", "--tokens", "4", "-n", "3", capsys=capsys)
    lengths = [len(ids) for ids in several["ids"]]  # type: ignore[attr-defined]
    assert len(lengths) == 3
    assert max(lengths) == 4  # one that ends its document is shorter
    assert run("verify", str(out), capsys=capsys)[0] == 0
    code, text, _ = run("sample", str(out), "the cat", "--tokens", "0", capsys=capsys)
    assert (code, text) == (ExitCode.CONFIG, "")
    code, _, err = run("sample", str(out), "the cat", "--device", "abacus", capsys=capsys)
    assert (code, "unknown device 'abacus'" in err) == (ExitCode.CONFIG, True)
    assert run("sample", str(out), "\udcff", "--tokens", "2", capsys=capsys)[0] == 0
    assert (
        run("plot", str(out), "--out", str(tmp_path / "curves.xyz"), capsys=capsys)[0]
        == ExitCode.CONFIG
    )
    plotted = run_json(
        "plot", str(out), str(out), "--out", str(tmp_path / "both.png"), "--pictures", capsys=capsys
    )
    assert all(Path(path).is_file() for path in plotted["pictures"])  # type: ignore[attr-defined]
    shard = data / "train_000000.bin"
    damaged = bytearray(shard.read_bytes())
    damaged[2000] ^= 1
    shard.write_bytes(damaged)
    code, text, _ = run("verify", str(data), capsys=capsys)
    assert code == ExitCode.DATA
    assert "train_000000.bin" in text


@pytest.mark.parametrize(
    ("line", "name", "expected"),
    [
        ("sample run --tokens 5 hello", "prompt", "hello"),
        ("sample run --tokens 5", "prompt", "-"),
        ("sample --tokens 5 run hello --seed 1", "prompt", "hello"),
        ("plot a --x seconds b", "runs", [Path("a"), Path("b")]),
    ],
)
def test_words_after_an_option_are_positional(line: str, name: str, expected: object) -> None:
    assert getattr(parse(line.split(), COMMANDS), name) == expected


def test_a_word_too_many_is_an_error_wherever_it_stands() -> None:
    with pytest.raises(ConfigError, match="unrecognized arguments: more"):
        parse(["sample", "run", "hello", "--tokens", "5", "more"], COMMANDS)


def test_the_home_folder_is_meant_where_a_shell_leaves_its_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of --out=~/run and data.path=~/data the shell expands nothing, and of a recipe or a call no shell reads."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    assert main(["prepare", "~/text.txt", "--tokenizer", "bytes", "--out=~/data"]) == 0
    small = "machine.threads=1 machine.micro_batch=1 model.n_layer=1 model.seq_len=32 budget.batch_tokens=32"
    for name, path in ("run", "~/data"), ("mixed", "~/data:0.5,~/data:0.5"):
        words = [
            "train",
            "quickstart",
            f"data.path={path}",
            f"--out=~/{name}",
            "budget.steps=1",
            *small.split(),
        ]
        assert main(words) == 0
    assert (tmp_path / "run" / "config.yaml").is_file()
    assert main(["sample", str(tmp_path / "run"), "~/", "--tokens", "1"]) == 0
    assert parse(["train", "finetune", "--init=~/run"], COMMANDS).init == f"{tmp_path}/run"
    words = ["train", "quickstart", "sample.prompt=~/", "model.init=~/run", "--out", "~"]
    options = parse(words, COMMANDS)
    assert (options.overrides, options.out) == (
        ["sample.prompt=~/", f"model.init={tmp_path}/run"],
        Path("~"),
    )
    capsys.readouterr()
    assert not list(Path().iterdir())
