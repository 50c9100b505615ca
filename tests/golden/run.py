"""Train small runs and record every loss and the hash of the final checkpoint.

    python -m tests.golden.run record golden.json      # before a change
    python -m tests.golden.run check golden.json       # after it

Everything runs in fp32 with fixed kernels on one thread per process. Each run is killed after some
steps and resumed. The bits depend on the processor, so both commands must run on the same machine.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

MACHINE = [
    "machine.device=cpu",
    "machine.precision=fp32",
    "machine.threads=1",
    "machine.attention=flash",
    "machine.gemm_backend=torch",
    "machine.adamw=fused",
    "machine.fused=off",
    "machine.compile=off",
    "log.plots=false",
    "sample.every=0",
    "save.every=2steps",
    "save.keep_last=3",
]
TINY = [
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.seq_len=64",
    "model.vocab_size=0",
    "budget.epochs=0",
    "budget.tokens=0",
    "budget.steps=12",
    "budget.batch_tokens=512",
    "machine.micro_batch=2",
    "optim.warmup=2steps",
]
KILL_AFTER_STEP = 5
TIMEOUT_SECONDS = 300


@dataclass(frozen=True)
class Golden:
    """A run: its recipe, settings, dataset and number of processes.

    base: the run it starts from.
    """

    recipe: str
    data: str = "text"
    settings: str = ""
    nproc: int = 1
    base: str = ""


GPT2 = "model.dropout=0.1 evaluate.every=6steps evaluate.tokens=1024"
ROWS = "budget.batch_tokens=512 evaluate.every=6steps"
GRPO = (
    f"{ROWS} objective.group=4 objective.reward=number objective.max_new_tokens=8 objective.kl=0.01"
)
RUNS = {
    "quickstart": Golden("quickstart", settings="evaluate.every=6steps evaluate.tokens=1024"),
    "gpt2": Golden("gpt2-124m", settings=GPT2),
    "gpt2-deterministic": Golden("gpt2-124m", settings=f"{GPT2} machine.deterministic=true"),
    "gpt2-replicas": Golden("gpt2-124m", settings=f"{GPT2} machine.sharding=none", nproc=2),
    "gpt2-zero1": Golden("gpt2-124m", settings=f"{GPT2} machine.sharding=zero1", nproc=2),
    "gpt2-zero3": Golden("gpt2-124m", settings=f"{GPT2} machine.sharding=zero3", nproc=2),
    "gpt2-tp": Golden("gpt2-124m", settings=f"{GPT2} machine.tensor_parallel=2", nproc=2),
    "modern": Golden("modern-124m"),
    "modern-mask": Golden("modern-124m", settings="data.document_mask=true"),
    "modern-replicas": Golden("modern-124m", settings="machine.sharding=none", nproc=2),
    "modern-zero3": Golden("modern-124m", settings="machine.sharding=zero3", nproc=2),
    "modern-tp": Golden("modern-124m", settings="machine.tensor_parallel=2", nproc=2),
    "sft": Golden("sft", "chats", ROWS, base="gpt2"),
    "sft-replicas": Golden("sft", "chats", ROWS, nproc=2, base="gpt2"),
    "dpo": Golden("dpo", "pairs", ROWS, base="gpt2"),
    "dpo-zero3": Golden("dpo", "pairs", f"{ROWS} machine.sharding=zero3", nproc=2, base="gpt2"),
    "kto": Golden("kto", "rated", ROWS, base="gpt2"),
    "grpo": Golden("grpo", "prompts", GRPO, base="sft"),
    "grpo-replicas": Golden("grpo", "prompts", GRPO, nproc=2, base="sft"),
    "ppo": Golden("ppo", "prompts", GRPO.replace("objective.group=4", ""), base="sft"),
    "reward": Golden("reward", "pairs", ROWS, base="gpt2"),
}


def megatoken(*words: str, cwd: Path) -> list[str]:
    """Return the command line of a `megatoken` command whose cache is in `cwd`."""
    return [sys.executable, "-m", "megatoken", *words]


def run_to_end(words: list[str], cwd: Path) -> None:
    done = subprocess.run(
        megatoken(*words, cwd=cwd), cwd=cwd, capture_output=True, text=True, env=environment(cwd)
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-3000:]}")


def environment(cwd: Path) -> dict[str, str]:
    return os.environ | {"MEGATOKEN_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1"}


def run_and_kill(words: list[str], cwd: Path, metrics: Path) -> None:
    """Start a run and kill all of its processes once KILL_AFTER_STEP is logged."""
    with (cwd / "killed.log").open("wb") as log:
        process = subprocess.Popen(
            megatoken(*words, cwd=cwd),
            cwd=cwd,
            stdout=log,
            stderr=log,
            env=environment(cwd),
            start_new_session=True,
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            if any(step >= KILL_AFTER_STEP for step, _ in read_losses(metrics)):
                break
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_losses(metrics: Path) -> list[tuple[int, str]]:
    """Return (step, loss) of every train and val row."""
    if not metrics.is_file():
        return []
    rows = [
        json.loads(line)
        for line in metrics.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    return [
        (row["step"], f"{row['kind']} {row['loss']!r}")
        for row in rows
        if row["kind"] in ("train", "val")
    ]


def hash_checkpoint(run: Path) -> str:
    """Return a hash of all tensors of the newest checkpoint: weights and optimizer state."""
    newest = max(path for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    digest = hashlib.sha256()
    for file in sorted(newest.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(f"{file.relative_to(newest)} {name}".encode())
                digest.update(tensors.get_tensor(name).contiguous().numpy().tobytes())
    return digest.hexdigest()


def prepare_data(cwd: Path) -> None:
    """Write text, conversations, preferences, rated answers and prompts that are the same on every machine."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(300)]
    lines = [" ".join(draw.choices(words, k=12)) + "." for _ in range(4000)]
    (cwd / "text.jsonl").write_text(
        "".join(json.dumps({"text": "\n".join(lines[n : n + 5])}) + "\n" for n in range(0, 4000, 5))
    )
    sums = [(a, b) for a in range(20) for b in range(20)]
    draw.shuffle(sums)
    chats, pairs, rated, prompts = [], [], [], []
    for a, b in sums:
        question = {"role": "user", "content": f"{a} + {b}"}
        right = {"role": "assistant", "content": str(a + b)}
        wrong = {"role": "assistant", "content": str(a + b + draw.randint(1, 5))}
        chats.append({"messages": [question, right]})
        pairs.append({"prompt": [question], "chosen": [right], "rejected": [wrong]})
        rated += [
            {"prompt": [question], "completion": [answer], "label": answer is right}
            for answer in (right, wrong)
        ]
        prompts.append({"prompt": f"{a} + {b}", "answer": str(a + b)})
    named = {"chats": chats, "pairs": pairs, "rated": rated, "prompts": prompts}
    for name, rows in named.items():
        (cwd / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare = ["--val-fraction", "0.1", "--tokenizer"]
    run_to_end(["prepare", "text.jsonl", "--out", "data/text", *prepare, "bytes"], cwd)
    for name in named:
        words = ["prepare", f"{name}.jsonl", "--out", f"data/{name}", "--context", "64"]
        run_to_end([*words, *prepare, "data/text"], cwd)


def train(name: str, golden: Golden, cwd: Path) -> dict[str, object]:
    """Train a run, killed once and resumed; return its losses and the hash of its last checkpoint."""
    out = f"runs/{name}"
    words = ["train", golden.recipe, "--out", out, "--nproc", str(golden.nproc)]
    words += [f"data.path=data/{golden.data}", *MACHINE]
    words += [w for w in TINY if not (golden.base and w.startswith("model."))]
    words += golden.settings.split()
    words += ["--init", f"runs/{golden.base}"] if golden.base else []
    metrics = cwd / out / "metrics.jsonl"
    run_and_kill(words, cwd, metrics)
    run_to_end(words, cwd)
    return {"losses": read_losses(metrics), "hash": hash_checkpoint(cwd / out)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", help="runs; their bases must be among them")
    options = parser.parse_args()
    expected = json.loads(options.file.read_text()) if options.action == "check" else {}
    results, n_wrong = {}, 0
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        cwd = Path(folder)
        prepare_data(cwd)
        for name in options.names or RUNS:
            start = time.monotonic()
            result = results[name] = json.loads(json.dumps(train(name, RUNS[name], cwd)))
            verdict = "recorded"
            if options.action == "check":
                is_equal = result == expected[name]
                n_wrong += not is_equal
                verdict = "equal" if is_equal else "DIFFERENT"
            print(f"{name}: {verdict}, {time.monotonic() - start:.0f} s", flush=True)
    if options.action == "record":
        options.file.write_text(json.dumps(results, indent=1) + "\n")
    return min(n_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
