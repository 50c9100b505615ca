"""llm.c as a baseline: what is built, what it is given and how its log is read, on a stand-in for its train_gpt2.c."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatoken.bench.llmc import LOG, LlmcTrainer
from megatoken.bench.runner import measure_workers
from megatoken.bench.spec import LLMC, OURS, WorkerSpec
from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import OptimConfig
from megatoken.console import Console
from megatoken.errors import ConfigError, ExitCode, PeerError

needs_compiler = pytest.mark.skipif(
    not (shutil.which("make") and shutil.which("cc")), reason="needs make and cc"
)
CONFIG = ModelConfig(n_layer=1, n_head=2, d_model=32, d_ff=128, vocab_size=128, seq_len=16)
MAKEFILE = "CFLAGS = -DSCALE=1000\nLDLIBS = -lm\n$(shell mkdir -p $(BUILD_DIR))\n"
# The names that llm.c's file has and the driver uses. Its loss: 1000 times the step, and the sums of both kinds of ids.
SOURCE = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifndef TESTING
#error "the checkout's own main would be built"
#endif
#define mallocCheck malloc
typedef struct { float mean_loss; int layers; int calls; } GPT2;
void gpt2_build_from_checkpoint(GPT2 *model, const char *path) {
    int header[256];
    FILE *file = fopen(path, "rb");
    if (!file || fread(header, sizeof(int), 256, file) != 256) { exit(9); }
    fclose(file);
    model->layers = header[4];
    model->calls = 0;
    printf("[GPT-2]\\nnum_layers: %d\\n", model->layers);
}
void gpt2_forward(GPT2 *model, int *inputs, int *targets, int B, int T) {
    model->mean_loss = 0;
    for (int i = 0; i < B * T; i++) { model->mean_loss += inputs[i] + targets[i]; }
    if (inputs[0] == 99) { printf("Error: no memory\\n"); exit(3); }
}
void gpt2_zero_grad(GPT2 *model) { model->calls += 1; }
void gpt2_backward(GPT2 *model) { model->calls += 10; }
void gpt2_update(GPT2 *model, float lr, float b1, float b2, float eps, float decay, int t) {
    if (lr != 6e-4f || b1 != 0.9f || b2 != 0.95f || eps != 1e-8f || decay != 0.1f) { exit(4); }
    model->mean_loss += SCALE * t + model->calls / 11 - t;
}
void gpt2_free(GPT2 *model) {}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "train_gpt2.c").write_text(SOURCE)
    return folder / "train_gpt2.c"


def test_the_lines_of_llmcs_log() -> None:
    """As in its README: `step 0: train loss 5.356189 (took 3452.265000 ms)`."""
    for line, found in (
        ("step 0: train loss 5.356189 (took 3452.265000 ms)", ("5.356189", "3452.265000")),
        ("step 12: train loss nan (took 0.5 ms)", ("nan", "0.5")),
        ("val loss 5.325522", None),
        ("num_layers: 12", None),
    ):
        logged = LOG.fullmatch(line)
        assert (logged and logged.groups()) == found


@needs_compiler
def test_steps_of_a_built_checkout(source: Path) -> None:
    trainer = LlmcTrainer(source, CONFIG, OptimConfig(), batch_seqs=2)
    inputs, targets = torch.full((2, 16), 2), torch.full((2, 16), 3)
    assert [trainer.step(inputs, targets) for _ in range(3)] == [
        32 * 5 + 1000 * step for step in (1, 2, 3)
    ]
    assert 0 <= trainer.step_seconds < 60
    assert trainer.peak_memory_bytes() > 1e5 or not Path("/proc/self/status").is_file()
    with pytest.raises(PeerError, match=r"llm\.c ended with code 3: Error: no memory"):
        trainer.step(torch.full((2, 16), 99), targets)
    assert sorted(path.name for path in source.parent.iterdir()) == ["Makefile", "train_gpt2.c"], (
        "nothing is left"
    )


@needs_compiler
def test_it_takes_turns_with_ours(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.bench.runner.MOST_STEPS", 2)
    ours = WorkerSpec(
        name=OURS, model_config=CONFIG, batch_seqs=2, device="cpu", machine={"threads": 1}
    )
    theirs = replace(ours, name=LLMC, source=str(source), configuration="fp32 C")
    _, worker = measure_workers([ours, theirs], 2, Console(quiet=True))
    assert (worker.skipped, worker.chosen, len(worker.ratios)) == (
        "",
        "fp32 C, no gradient clipping",
        2,
    )
    assert worker.loss is not None
    assert worker.loss > 1000 * worker.steps


@needs_compiler
def test_what_cannot_be_built_is_named(source: Path) -> None:
    source.write_text("#error out of order\n")
    with pytest.raises(ConfigError, match=r"cannot build llm\.c: .*out of order"):
        LlmcTrainer(source, CONFIG, OptimConfig(), batch_seqs=2)
    (source.parent / "Makefile").unlink()
    with pytest.raises(ConfigError, match="built by make and its Makefile"):
        LlmcTrainer(source, CONFIG, OptimConfig(), batch_seqs=2)


def test_a_folder_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--llmc", str(tmp_path)]) == ExitCode.CONFIG
    message = (
        f"no such file of llmc — {tmp_path / 'train_gpt2.c'} — give a checkout or its train_gpt2.c"
    )
    assert capsys.readouterr().err == f"error: {message}\n"
