"""llm.c's command line is translated field by field, and trains."""

from pathlib import Path

import numpy as np
import pytest

from megatoken.base.config.schema import flatten
from megatoken.base.errors import ConfigError, ExitCode
from megatoken.cli.main import main
from megatoken.convert.recipes.llmc import TABLE
from megatoken.convert.recipes.llmc import translate as translate_llmc
from megatoken.train.state import build_step_config
from tests.conftest import Ask
from tests.convert.models import draw_model, save_llmc, translated_values
from tests.data.small_dataset import write_external
from tests.tables import read_table
from tests.tiny_run import MACHINE

REFERENCE = (  # the 124M run on FineWeb
    "-i dev/data/fineweb10B/fineweb_train_*.bin -j dev/data/fineweb10B/fineweb_val_*.bin "
    "-e d12 -b 64 -t 1024 -d 524288 -r 1 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -v 250 -s 20000 -h 1"
)


REFERENCE_FIELDS = """
model.preset gpt2-124m
model.seq_len 1024
data.path dev/data/fineweb10B/fineweb_*.bin
data.order shuffled
optim.lr 0.0006
optim.schedule cosine
optim.warmup 700steps
optim.min_lr_ratio 0.0
optim.beta1 0.9
optim.beta2 0.95
optim.eps 1e-08
optim.weight_decay 0.1
optim.grad_clip 1.0
budget.epochs 1.0
budget.batch_tokens 524288
machine.tf32 True
machine.micro_batch 64
machine.activation_checkpointing gelu
machine.sharding zero1
save.every 5000steps
save.keep_every 5000steps
evaluate.every 250steps
evaluate.tokens 10485760
evaluate.tasks hellaswag
evaluate.tasks_every 250steps
sample.every 20000steps
sample.tokens 63
sample.temperature 1.0
sample.top_k 0
"""


def test_reference_run_field_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    resolved = translate_llmc(REFERENCE, processes=8).resolve([])
    assert translated_values(resolved) == read_table(REFERENCE_FIELDS)
    assert resolved.name == "llmc-d12"
    assert resolved.origins["optim.warmup"] == "llm.c -u 700"
    assert resolved.origins["machine.tf32"] == "llm.c -f 1 (default)"


# At steps 0, 10, 60 and 93, with r = (step - warm-up) / (steps - warm-up):
# min + 0.5 (1 + cos(pi r)) (lr - min); wsd, from step 88 on: min + (1 - sqrt(r)) (lr - min).
RATES = """\
cosine 2e-4 2e-3 1.1e-3 3.2533218e-4
linear 2e-4 2e-3 1.1e-3 5.06e-4
constant 2e-3 2e-3 2e-3 2e-3
wsd 2e-4 2e-3 2e-3 1.1418837e-3
"""


@pytest.mark.parametrize("row", RATES.splitlines())
def test_learning_rates_equal_llmc(row: str):
    """llm.c's constant rate has no warm-up."""
    decay, *rates = row.split()
    words = f"-e d6 -t 64 -b 4 -d 256 -x 110 -l 0.002 -u 10 -q 0.1 -k {decay}"
    run = translate_llmc(words).resolve([]).config
    schedule = build_step_config(run, epoch_tokens=10**6).schedule
    found = [schedule.lr(step) for step in (0, 10, 60, 93)]
    assert found == pytest.approx([*map(float, rates)])


COMMANDS = """\
-e gpt2:d48: model.preset=gpt2-1558m
-e gpt3:c2048 -t 2048: model.preset=gpt3-1.3b model.seq_len=2048
-e d6: model.n_layer=6 model.n_head=6 model.d_model=384
-e d12 -b 8: budget.batch_tokens=8192 machine.micro_batch=8
-e d12 -x 20 -n 10 -nk 3 -nm 20: budget.steps=20 save.keep_last=3 save.keep_every=20steps
-e d12 -r 0 -f 0: machine.activation_checkpointing=none machine.tf32=False
mpirun -np 8 ./train_gpt2cu -e d12 -b 4: budget.batch_tokens=32768 evaluate.tokens=655360
./train_gpt2cu \\\\n -e d12 \\\\n -pn 2: budget.batch_tokens=8192
"""


@pytest.mark.parametrize("row", COMMANDS.splitlines())
def test_other_commands(row: str):
    words, _, expected = row.replace("\\n", "\n").rpartition(": ")
    values = flatten(translate_llmc(words).resolve([]).config)
    for word in expected.split():
        key, _, value = word.partition("=")
        assert str(values[key]) == value


REFUSED = """\
-e d12 -bs 4
-e d12 -b x
-e d13
-e d12 -t 2048
-e d12 -d 5000
-e d12 -sl 3.0
-e d12 -i a/x_train.bin -j b/x_val.bin
-e 'd12
"""


def test_refused_commands(tmp_path: Path):
    assert main(["config", "quickstart", "--llmc", "-e d12"]) == ExitCode.CONFIG  # two recipes
    shards = f"-e d12 -i {tmp_path}/fw_train_*.bin -j {tmp_path}/fw_val_*.bin"
    for name in ("fw_train_1.bin", "fw_val_0.bin", "fw_test_0.bin"):
        (tmp_path / name).touch()
    for words in (*REFUSED.splitlines(), shards):
        with pytest.raises(ConfigError):
            translate_llmc(words)
    (tmp_path / "manifest.json").touch()
    assert translate_llmc(shards).resolve([]).config.data.path == str(tmp_path)


def test_every_flag_of_its_usage():
    usage = "i j e o lg n nk nm y b t d x k l u q c sl sg v m s g h a f w ge z r pn pr pg pm ps pp"
    assert {f"-{flag}" for flag in usage.split()} <= {*TABLE["settings"], *TABLE["ignored"]}


def test_train_from_llmcs_files(tmp_path: Path, ask: Ask):
    """Train from llm.c's shards, checkpoint and flags, and export to llm.c again."""
    ids = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    (tmp_path / "data").mkdir()
    write_external(tmp_path / "data/b_train_0.bin", ids)
    write_external(tmp_path / "data/b_val_0.bin", ids[:500])
    name = save_llmc(tmp_path / "first", draw_model())
    flags = f"-i {tmp_path}/data/b_train_*.bin -j {tmp_path}/data/b_val_*.bin -e {name}"
    flags += f" -o {tmp_path}/run -b 4 -t 24 -d 192 -x 3 -u 1 -l 0.001 -v 2 -m 2 -s 0 -z 1"
    summary = ask(f"train --llmc '{flags}' data.tokenizer={name.parent} {MACHINE}")
    assert (summary["run"], summary["steps"], summary["tokens"]) == (f"{tmp_path}/run", 3, 576)
    back = tmp_path / "back"
    assert main(f"export {tmp_path / 'run'} --to llmc --out {back}".split()) == ExitCode.DONE
    assert (back / "model.bin").stat().st_size == name.stat().st_size
