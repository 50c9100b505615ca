"""Run the benchmarks for one GPU, most wanted first, within a time limit; each writes its record.

Needs no installation: PYTHONPATH=src python benchmarks/gpu.py. Benchmarks that fail or run out of
time are listed at the end. `--tiny` runs the same list at sizes for any machine, also a CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RECORD = Path(__file__).with_name("record.py")
SKIP_SECONDS = 20.0  # nothing useful is measured in less


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A benchmark: its record's name, its arguments and its time limit.

    module: run and record this module instead of `megatoken bench`.
    """

    name: str
    words: str
    seconds: float = 120.0
    module: str = ""


def list_benches(nanogpt: str, build_nanogpt: str) -> list[Bench]:
    """Return the benchmarks for one large GPU, most wanted first."""
    step = "--preset {0} --batch-seqs {1}"
    small, largest = step.format("gpt2-124m", 64), step.format("gpt2-1558m", 32)
    sources = (f" --nanogpt {nanogpt}" if nanogpt else "") + (
        f" --build-nanogpt {build_nanogpt}" if build_nanogpt else ""
    )
    return [
        Bench(
            name="gpu-124m",
            words=f"knob compile {small} --values on,blocks,off --repeats 10",
            seconds=150,
        ),
        Bench(name="gpu-parts-124m", words="parts --batch-tokens 65536"),
        Bench(name="gpu-fused-124m", words=f"knob fused {small} --values off,on --repeats 10"),
        Bench(name="gpu-1558m", words=f"knob compile {largest} --values blocks", seconds=150),
        Bench(name="gpu-355m", words=f"knob compile {step.format('gpt2-355m', 64)} --values on"),
        Bench(name="gpu-774m", words=f"knob compile {step.format('gpt2-774m', 32)} --values on"),
        Bench(name="gpu-peers-124m", words=f"peers {small}{sources}", seconds=180),
        Bench(name="gpu-attention", words="attention --longest 4096 --seqs 16"),
        Bench(name="gpu-gemm", words="gemm --largest 8192"),
        Bench(name="gpu-attention-124m", words=f"knob attention {small} --values flash,cudnn,fa2"),
        Bench(name="gpu-micro-batch-124m", words=f"knob micro_batch {small} --values 8,16,32,64"),
        Bench(name="gpu-recompute-124m", words=f"knob activation_checkpointing {small}"),
        Bench(name="gpu-mixed-124m", words=f"knob master_weights {small} --values off,on"),
        Bench(
            name="gpu-graphs-small",
            words=f"knob compile {step.format('gpt2-124m', 2)} --values on,graphs",
        ),
        Bench(name="gpu-ladder", words="ladder --repeats 3", seconds=240),
        Bench(
            name="gpu-loss-124m",
            words="--steps 200 --batch-tokens 65536",
            seconds=400,
            module="benchmarks.loss_parity",
        ),
    ]


def list_tiny_benches() -> list[Bench]:
    """Return the same commands at sizes that take seconds on any machine."""
    tiny = "--seq-len 32 --batch-seqs 2 --repeats 1"
    return [
        Bench(name="gpu-124m", words=f"knob compile {tiny} --values blocks,off"),
        Bench(name="gpu-parts-124m", words="parts --batch-tokens 64 --repeats 1"),
        Bench(name="gpu-fused-124m", words=f"knob fused {tiny} --values off,on"),
        Bench(name="gpu-peers-124m", words=f"peers {tiny} --no-compile --only transformers"),
        Bench(name="gpu-attention", words="attention --longest 128 --repeats 1"),
        Bench(name="gpu-gemm", words="gemm --largest 256 --repeats 1"),
        Bench(name="gpu-attention-124m", words=f"knob attention {tiny} --values flash,cudnn,fa2"),
        Bench(name="gpu-micro-batch-124m", words=f"knob micro_batch {tiny} --values 1,2"),
        Bench(name="gpu-recompute-124m", words=f"knob activation_checkpointing {tiny}"),
        Bench(name="gpu-mixed-124m", words=f"knob master_weights {tiny} --values off"),
        Bench(name="gpu-graphs-small", words=f"knob compile {tiny} --values graphs,off"),
        Bench(
            name="gpu-loss-124m",
            words="--steps 5 --batch-tokens 256 --tiny",
            module="benchmarks.loss_parity",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("records"), help="folder for the records (default records)"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="time for everything (default 9.5)"
    )
    parser.add_argument("--only", default="", metavar="NAME,...", help="some of the records")
    parser.add_argument("--tiny", action="store_true", help="walk through at tiny sizes")
    parser.add_argument(
        "--nanogpt", default="", metavar="PATH", help="checkout of nanoGPT, for the peers"
    )
    parser.add_argument(
        "--build-nanogpt", default="", metavar="PATH", help="train_gpt2.py of build-nanogpt"
    )
    options = parser.parse_args()
    benches = (
        list_tiny_benches()
        if options.tiny
        else list_benches(options.nanogpt, options.build_nanogpt)
    )
    if options.only:
        benches = [bench for bench in benches if bench.name in options.only.split(",")]
    deadline = time.monotonic() + 60 * options.minutes
    outcome: dict[str, str] = {}
    for bench in benches:
        left = deadline - time.monotonic()
        outcome[bench.name] = run(bench, options.device, options.out, min(left, bench.seconds))
        print(f"=== {bench.name}: {outcome[bench.name]}\n", flush=True)
    print(
        json.dumps(
            {
                "benches": outcome,
                "done": sum(result.startswith("done") for result in outcome.values()),
            }
        )
    )
    return 0


def run(bench: Bench, device: str, out: Path, seconds: float) -> str:
    """Run one benchmark and return its outcome."""
    if seconds < SKIP_SECONDS:
        return "skipped: no time left"
    words = [*bench.words.split(), "--device", device]
    name = bench.words.split()[0]
    if bench.module:
        command = [
            str(RECORD),
            "--out",
            str(out),
            bench.name,
            "--",
            sys.executable,
            "-m",
            bench.module,
            *words,
        ]
    else:
        program = (
            ["benchmarks"] if name in ("peers", "attention", "gemm") else ["megatoken", "bench"]
        )
        command = ["-m", *program, *words, "--out", str(out), "--name", bench.name]
    print(f"=== {bench.name}: {' '.join(command)}", flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run([sys.executable, *command], timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    return f"done in {time.monotonic() - start:.0f} s" if code == 0 else f"failed with code {code}"


if __name__ == "__main__":
    sys.exit(main())
