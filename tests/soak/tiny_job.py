"""The job that the soaks disturb.

A step takes some tens of milliseconds, a checkpoint 1.5 MB, a start some seconds.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.base.system.process import at_parent_death
from tests.processes import group_members
from tests.tiny_run import write_shards

RECIPE = """\
model: {n_layer: 2, n_head: 2, d_model: 64, seq_len: 64, vocab_size: 512, dropout: 0.1}
data: {path: DATA, tokenizer: bytes}
optim: {lr: 1e-3, warmup: 5steps}
budget: {steps: 100, batch_tokens: 768}
machine: {device: cpu, precision: fp32, micro_batch: 3, threads: 1, gemm_backend: torch, attention: flash}
save: {every: 4steps, keep_last: 3}
evaluate: {every: 25steps, tokens: 1536}
sample: {every: 50steps, tokens: 8}
log: {plots: false}
"""
STUCK_SECONDS = 240.0  # without what must come: the soak has found a hang

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Layout:
    """Processes, and what they split."""

    nproc: int
    sharding: str

    @property
    def words(self) -> list[str]:
        line = f"machine.sharding={self.sharding}"
        return (line + " machine.deterministic=true" * (self.sharding == "none")).split()


def write_recipe(folder: Path) -> Path:
    """Write the recipe and its data into a new folder."""
    lines = (f"{n} bottles of beer on the wall, take {n % 7} down\n" for n in range(20_000))
    text = "".join(lines).encode()
    write_shards(folder, text[:-10_000], text[-10_000:])
    (folder / "tiny.yaml").write_text(RECIPE.replace("DATA", f"{folder}/*.npy"))
    return folder / "tiny.yaml"


def run_quietly(words: Sequence[str], **options: Any) -> int:
    """Run a command without its output; return its exit code."""
    null = subprocess.DEVNULL
    return subprocess.run(words, stdout=null, stderr=null, **options).returncode


def command(recipe: Path, out: Path, layout: Layout, words: Sequence[str] = ()) -> list[str]:
    line = f"-P -m megatoken train {recipe} --out {out} --nproc {layout.nproc}"
    return [sys.executable, *line.split(), *layout.words, *words]


def start_session(
    words: Sequence[str], prepare: Callable[[], object] = lambda: None, **options: Any
) -> Process:
    """Start in a session of its own, which does not outlive the soak. prepare: called in the child."""
    follow_parent = at_parent_death(signal.SIGKILL)

    def prepare_child():
        # nohup and a job in the background start with them ignored.
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        follow_parent()
        prepare()

    return subprocess.Popen(words, start_new_session=True, preexec_fn=prepare_child, **options)


def kill_group(process: Process) -> None:
    """SIGKILL the process and all ranks at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not group_members(process.pid), process)


def list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def drafts(out: Path) -> set[str]:
    """Names of the checkpoints that are being written, or were when a run was killed."""
    return {path.name for path in (out / "checkpoints").glob(".tmp-step-*")}


def wait_for(condition: Callable[[], bool], process: Process, *, or_end: bool = False) -> bool:
    """Poll until the condition holds, or the process has ended (or_end); return whether it holds.

    Raises TimeoutError after STUCK_SECONDS, having killed the process group.
    """
    deadline = time.monotonic() + STUCK_SECONDS
    while not condition():
        if or_end and process.poll() is not None:
            return condition()
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise TimeoutError(f"no progress within {STUCK_SECONDS:.0f} s: {process.args!r}")
        time.sleep(0.001)
    return True
