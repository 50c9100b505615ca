"""The examples of docs/extending.md, all of them in one run, through the command line."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatoken.base.errors import CheckpointError, ConfigError
from megatoken.base.rooms import REGISTERED
from megatoken.base.system.environment import IMPORT
from megatoken.model.flops import count_padded_parameters, flops_per_token
from megatoken.model.gpt import GPT, Linear
from megatoken.model.loss import label_smoothing, sum_terms, z_loss
from megatoken.store.pretrained import load_weights
from tests.conftest import Call
from tests.tiny_model import TINY_GPT
from tests.tiny_run import TINY, assert_equal_tensors, read_column, read_losses, tiny_run, train

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text()
MODULES = {
    re.search(r'ENTRIES = .*?"(\w+):', block, re.S)[1]: block  # type: ignore[index]
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
}
MODEL = "model.norm=dyt model.mlp=reglu model.block=parallel"
SETTINGS = (
    f"{MODEL} machine.attention=softcap objective.terms=z=1e-2,second=0.5,smoothing=0.1 "
    "optim.name=signum optim.lr=1e-2 optim.schedule=exponential"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page's modules to a folder."""
    folder = tmp_path_factory.mktemp("modules")
    for name, code in MODULES.items():
        assert len(code.splitlines()) <= 25
        (folder / f"{name}.py").write_text(code)
    return folder


@pytest.fixture
def modules(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> str:
    """Prepare data in a new current folder, and return the names of the page's modules."""
    monkeypatch.setenv(IMPORT, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    assert call("prepare squares --tokenizer bytes --out data --import squares")[0] == 0
    return ",".join(MODULES)


def test_a_run_of_every_example_resumes_samples_and_is_refused_without_them(
    modules: str, monkeypatch: pytest.MonkeyPatch, call: Call
):
    monkeypatch.setenv(IMPORT, modules)
    settings = f"{SETTINGS} data.path=data"
    assert call(f"train {TINY} --out whole {settings} log.sinks=losses")[0] == 0
    whole, out = Path("whole"), Path("stopped")
    assert (whole / "losses.csv").read_text().endswith(f"12,{read_losses(whole)[-1]}\n")
    train(out, settings, stop=5)
    train(out, settings)
    assert read_losses(out) == read_losses(whole)
    assert_equal_tensors(out, whole)
    assert read_column(out, "lr")[11] == pytest.approx(1e-2 * 0.1 ** ((10 - 5) / (12 - 5)))
    assert call(f"train {TINY} --nproc 2 --out ranks {settings}")[0] == 0
    assert read_losses(Path("ranks")) == pytest.approx(read_losses(out), rel=1e-5)
    for step in (1, 7):
        row = {
            key: read_column(out, key)[step]
            for key in ("loss", "cross_entropy", "z", "second", "smoothing")
        }
        expected = (
            row["cross_entropy"] + 0.01 * row["z"] + 0.5 * row["second"] + 0.1 * row["smoothing"]
        )
        assert row["loss"] == pytest.approx(expected, rel=1e-6)
    assert call("sample whole 1 --tokens 4 --json")[0] == 0
    Path("parity.jsonl").write_text('{"number": 3}\n{"number": 4}\n')
    assert call("eval whole --tasks parity --data parity.jsonl")[0] == 0
    code, _, error = call("export whole --to hf --out exported")
    assert (code, "no format has attention 'softcap'" in error) == (2, True)
    monkeypatch.setenv(IMPORT, "")
    for command, expected in (("sample whole 1", 4), ("train whole", 2), ("plan whole", 2)):
        code, _, error = call(command)
        assert code == expected
        assert f"add --import {','.join(sorted(MODULES))}" in error
    with pytest.raises(CheckpointError, match="dyt"):
        load_weights("whole")


@pytest.mark.usefixtures("modules")
def test_rows_in_a_format_of_ones_own_are_prepared(call: Call):
    rows = '{"dialog": [["user", "hi"], ["assistant", "yes"]]}\n' * 40
    Path("dialogs.jsonl").write_text(rows)
    line = "prepare dialogs.jsonl --tokenizer bytes --context 64 --out chats --import dialog"
    code, printed, _ = call(line)
    assert (code, "40 documents" in printed) == (0, True)


@pytest.mark.usefixtures("modules")
def test_an_action_runs_and_an_observer_stops_the_run(call: Call):
    code, printed, _ = call(f"train {TINY} data.path=data optim.lr=0.1 --import watch")
    assert (code in (0, 75), "tensor(" in printed) == (True, True)
    losses = read_losses(Path("runs/tiny"))
    assert len(losses) == 12 or losses[-1] < 1 < min(losses[:-1])


def test_own_parts_are_counted_as_they_are_built(modules: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(IMPORT, modules)
    config = tiny_run(MODEL, "data.path=data").config.model.resolve(257)
    for model in (config, replace(config, lora_rank=4)):
        assert count_padded_parameters(model) == sum(p.numel() for p in GPT(model).parameters())
    matrices = 4 * 32**2 + 3 * 32 * 128  # a block's
    attention = 6 * 32 * 16
    assert flops_per_token(config, causal=True) == 6 * (2 * matrices + 257 * 32) + 2 * attention


def test_vectors_start_at_initial_and_wrong_entries_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Linear, "initial", {"bias": 0.5}, raising=False)
    assert GPT(TINY_GPT, seed=0).get_parameter("blocks.0.mlp.up.bias")[0] == 0.5
    for entry in (Linear, "torch:Typo"):
        monkeypatch.setitem(REGISTERED, "block", {"standard": entry})
        with pytest.raises(ConfigError, match=r"Typo|Block"):
            GPT(TINY_GPT)


def test_terms_are_sums_over_the_tokens_with_a_target_for_any_chunk(
    modules: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(IMPORT, modules)
    from second import predict_second

    torch.manual_seed(0)
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    weight = torch.randn(12, 8, requires_grad=True)
    targets = torch.tensor([[1, 4, -1, 2, 0], [3, -1, -1, 5, 9]])
    logits = F.linear(hidden, weight)[..., :10]
    log_p = logits.log_softmax(-1)
    has = targets >= 0
    z = (logits.logsumexp(-1) ** 2 * has).sum()
    uniform = -(log_p.mean(-1) * has).sum()
    own = -(log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * has).sum()
    pairs = [(0, 0, 4), (0, 3, 0), (1, 3, 9)]  # counted tokens whose successor has a target
    second = -sum(log_p[b, t, target] for b, t, target in pairs)
    expected = [z, uniform - own, second]
    rows = torch.arange(10).view(2, 5)
    terms = [z_loss, label_smoothing, predict_second]
    wanted = torch.autograd.grad(sum(expected), [hidden, weight], retain_graph=True)
    for chunk in (0, 3):
        found = sum_terms(terms, hidden, weight, targets, rows, vocab_size=10, chunk=chunk)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(sum(found), [hidden, weight]), wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no module 'wrong'"),
        ("ENTRIES = {'atention': {}}", "did you mean attention?"),
        ("ENTRIES = {'norm': {'rmsnorm': 'wrong:N'}}", "norm 'rmsnorm' exists"),
        ("ENTRIES = {'norm': {'n': len}}", "cannot read ENTRIES"),
        ("ENTRIES = {", "cannot read ENTRIES"),
    ],
)
def test_a_wrong_module_is_one_line(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
):
    monkeypatch.setenv(IMPORT, "")
    monkeypatch.chdir(tmp_path)
    name = "wrong"
    if text is not None:
        name += str(abs(hash(text)))
        Path(f"{name}.py").write_text(text)
    code, _, error = call(f"config quickstart --import {name}")
    assert (code, message in error) == (2, True)
