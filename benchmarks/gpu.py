"""Measure one GPU in calls of ten minutes, the most important figures first.

    python -m benchmarks.gpu --out FOLDER

Each figure has its own record, which is rewritten after every value. A benchmark that has a
finished record in the folder is not run again, so the same command continues after a stop or a
kill; an unfinished record is renamed first. Batch sizes depend on the memory of the card. `--data`
is trained on; without it, the standard library is prepared in the folder first, which takes half a
minute of the time. The last benchmark trains two recipes for five minutes each. Needs no
installation: PYTHONPATH=src. `--tiny` runs most of the list at sizes for any machine, also a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import megatoken
from benchmarks.journey import prepare_python
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import MachineConfig
from megatoken.base.errors import ConfigError
from megatoken.base.system.device import open_device
from megatoken.distributed.memory import USABLE, estimate_memory
from megatoken.distributed.parallel_dims import ParallelDims
from megatoken.study.commands.bench import DOCS

SKIP_SECONDS = 20.0  # nothing useful is measured in less
MOST_SEQS = {"gpt2-124m": 64, "gpt2-1558m": 32, "gpt2-355m": 64, "gpt2-774m": 32}
TINY = "--n-layer 2 --n-head 2 --d-model 64 --seq-len 32 --batch-seqs 2"
TINY_RUN = "model.n_layer=2 model.n_head=2 model.d_model=64 model.seq_len=64"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A benchmark: its record's name, its arguments and its time limit.

    module: what to run instead of `megatoken bench` or `python -m benchmarks`. continues: whether
    a second run continues the first one.
    """

    name: str
    arguments: str
    seconds: float = 90.0
    module: str = ""
    continues: bool = False

    def list_command(self, device: str, out: Path) -> list[str]:
        """Return the command that measures a device and writes the record to a folder."""
        arguments = [*self.arguments.split(), "--device", device]
        if self.module:
            record = [
                str(Path(__file__).with_name("record.py")),
                "--out",
                str(out),
                self.name,
                "--",
            ]
            return [sys.executable, *record, sys.executable, "-m", self.module, *arguments]
        installed = ["megatoken", "bench"]
        program = installed if arguments[0] in DOCS else ["benchmarks"]
        return [sys.executable, "-m", *program, *arguments, "--out", str(out), "--name", self.name]


def list_benches(memory_bytes: int, sources: str, data: str, out: Path) -> list[Bench]:
    """Return the benchmarks of a card with this memory, the most important first.

    sources: options of `sustained`, the other programs. data: a dataset folder.
    """
    steps = {
        preset: f"--preset {preset} --batch-seqs {find_batch(preset, most, memory_bytes)}"
        for preset, most in MOST_SEQS.items()
    }
    small = steps["gpt2-124m"]
    few = "--preset gpt2-124m --batch-seqs 2"
    larger = [
        Bench(
            name=f"gpu-{preset.removeprefix('gpt2-')}",
            arguments=f"knob compile {step} --values blocks",
        )
        for preset, step in steps.items()
        if step != small
    ]
    seqs = find_batch("gpt2-124m", MOST_SEQS["gpt2-124m"], memory_bytes)
    double = f"--preset gpt2-124m --batch-seqs {2 * seqs}"
    parts = f"parts --batch-tokens {1024 * seqs}"
    return [
        Bench(name="gpu-124m", arguments=f"knob compile {small} --values blocks"),
        Bench(name="gpu-parts-124m", arguments=parts),
        Bench(
            name="gpu-sustained-124m",
            arguments=f"--data {data} --batch-seqs {seqs},{8 * seqs}",
            module="benchmarks.sustained",
            seconds=150,
        ),
        Bench(
            name="gpu-compile-124m",
            arguments=f"knob compile {small} --values blocks,on",
            seconds=150,
        ),
        Bench(
            name="gpu-gemm-backend-124m",
            arguments=f"knob gemm_backend {small} --values cublaslt,torch",
        ),
        Bench(name="gpu-chunk-124m", arguments=f"knob loss_chunk {small} --values 16384,4096"),
        Bench(
            name="gpu-accumulate-124m",
            arguments=f"knob micro_batch {double} --values {2 * seqs},{seqs}",
            seconds=150,
        ),
        Bench(
            name="gpu-parts-accumulate-124m",
            arguments=f"parts --batch-tokens {2048 * seqs} machine.micro_batch={seqs}",
        ),
        Bench(
            name="gpu-journey", arguments=f"--data {data}", module="benchmarks.journey", seconds=150
        ),
        Bench(
            name="gpu-peers-124m",
            arguments=f"--data {data} --batch-seqs {seqs} --turns 2 {sources}",
            module="benchmarks.sustained",
            seconds=360,
        ),
        Bench(name="gpu-generate", arguments="generate --tokens 128 --repeats 3"),
        Bench(name="gpu-gradients", arguments="", module="benchmarks.gradients"),
        Bench(name="gpu-parts-compile-124m", arguments=f"{parts} machine.compile=on"),
        Bench(name="gpu-fp8-124m", arguments=f"knob fp8 {small} --values off,head"),
        Bench(name="gpu-fused-124m", arguments=f"knob fused {small} --values on,off"),
        Bench(name="gpu-attention-124m", arguments=f"knob attention {small} --values cudnn,fa2"),
        Bench(name="gpu-masters-124m", arguments=f"knob master_weights {small} --values on,off"),
        Bench(name="gpu-products-124m", arguments="products --repeats 10", seconds=60),
        Bench(name="gpu-documents-124m", arguments="", module="benchmarks.documents"),
        *larger,
        Bench(
            name="gpu-loss-124m",
            arguments=f"--steps 60 --batch-tokens 16384 --data {data}",
            module="benchmarks.loss_parity",
            seconds=150,
        ),
        Bench(name="gpu-graphs-small", arguments=f"knob compile {few} --values blocks,graphs,off"),
        Bench(
            name="gpu-recompute-124m",
            arguments=f"knob activation_checkpointing {small}",
            seconds=150,
        ),
        Bench(
            name="gpu-batch-124m",
            arguments=f"knob micro_batch {small} --values 64,32,16,8",
            seconds=150,
        ),
        Bench(name="gpu-attention", arguments="attention --longest 4096 --seqs 16"),
        Bench(name="gpu-gemm", arguments="gemm --largest 8192"),
        Bench(name="gpu-ladder", arguments="ladder --repeats 3", seconds=240),
        Bench(
            name="gpu-python-race",
            arguments=f"--work {out / 'race'}",
            module="benchmarks.python_race",
            seconds=1800,
            continues=True,
        ),
    ]


def find_batch(preset: str, most: int, memory_bytes: int) -> int:
    """Return the sequences of a step that fit in memory: at most `most`, halved until they do."""
    config = PRESETS[preset]
    seqs = most
    while seqs > 1:
        memory = estimate_memory(
            config, ParallelDims(), precision="bf16", micro_batch=seqs, accumulates=False
        )
        if memory.total_bytes <= USABLE * memory_bytes:
            break
        seqs //= 2
    return seqs


def list_tiny_benches(sources: str, data: str, out: Path) -> list[Bench]:
    """Return most of the commands at sizes that take seconds on any machine."""
    tiny = f"{TINY} --repeats 1"
    return [
        Bench(name="gpu-124m", arguments=f"knob compile {tiny} --values blocks"),
        Bench(name="gpu-fused-124m", arguments=f"knob fused {tiny} --values off,on"),
        Bench(name="gpu-parts-124m", arguments="parts --batch-tokens 64 --repeats 1"),
        Bench(
            name="gpu-parts-accumulate-124m",
            arguments="parts --batch-tokens 64 --seq-len 32 --repeats 1 machine.micro_batch=1",
        ),
        Bench(
            name="gpu-sustained-124m",
            arguments=f"--data {data} --seq-len 64 --batch-seqs 2,4 --tokens 0 {TINY_RUN}",
            module="benchmarks.sustained",
        ),
        Bench(name="gpu-chunk-124m", arguments=f"knob loss_chunk {tiny} --values 16,64"),
        Bench(name="gpu-gradients", arguments="--presets llama-5m", module="benchmarks.gradients"),
        Bench(
            name="gpu-journey",
            arguments=f"--data {data} --steps 16 --batch-seqs 2 {TINY_RUN}",
            module="benchmarks.journey",
        ),
        Bench(
            name="gpu-attention-124m", arguments=f"knob attention {tiny} --values flash,cudnn,fa2"
        ),
        Bench(name="gpu-masters-124m", arguments=f"knob master_weights {tiny} --values on,off"),
        Bench(name="gpu-products-124m", arguments="products --batch-tokens 64 --repeats 1"),
        Bench(
            name="gpu-peers-124m",
            arguments=f"--data {data} --seq-len 64 --batch-seqs 2 --tokens 0 {sources} {TINY_RUN}",
            module="benchmarks.sustained",
        ),
        Bench(
            name="gpu-loss-124m",
            arguments=f"--steps 5 --batch-tokens 256 --tiny --data {data}",
            module="benchmarks.loss_parity",
        ),
        Bench(name="gpu-graphs-small", arguments=f"knob compile {tiny} --values graphs,off"),
        Bench(name="gpu-generate", arguments="generate --tokens 4 --repeats 1"),
        Bench(name="gpu-batch-124m", arguments=f"knob micro_batch {tiny} --values 1,2"),
        Bench(name="gpu-attention", arguments="attention --longest 128 --repeats 1"),
        Bench(name="gpu-gemm", arguments="gemm --largest 256 --repeats 1"),
        Bench(
            name="gpu-python-race",
            arguments=f"--work {out / 'race'} --minutes 0.05 --batch-tokens 128 {TINY_RUN} "
            f"--packages {Path(megatoken.__file__).parent} --tokenizer bytes",
            module="benchmarks.python_race",
            continues=True,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="default cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-gpu"), help="folder (default runs/bench-gpu)"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="time for everything (default 9.5)"
    )
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="these records, in this order"
    )
    parser.add_argument("--tiny", action="store_true", help="walk through at tiny sizes")
    parser.add_argument("--before", help="src of another checkout, to take turns with this one")
    parser.add_argument("--sources", default="", help="'--nanogpt PATH --llmc PROGRAM'")
    parser.add_argument("--data", type=Path, help="dataset folder (default OUT/python)")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    try:
        memory_bytes = open_device(MachineConfig(device=options.device)).memory_bytes(1)
    except ConfigError as error:
        parser.error(str(error))
    data = options.data or options.out / "python"
    sources = options.sources + " --transformers" * bool(find_spec("transformers"))
    benches = (
        list_tiny_benches(sources, str(data), options.out)
        if options.tiny
        else list_benches(memory_bytes, sources, str(data), options.out)
    )
    if options.before:
        seqs = find_batch("gpt2-124m", MOST_SEQS["gpt2-124m"], memory_bytes)
        turns = f"busy --case 124m --batch-seqs {seqs} --loads 0 --source {options.before}"
        benches.insert(0, Bench(name="gpu-trees-124m", arguments=turns, seconds=150))
    if options.only:
        names = options.only.split(",")
        benches = [bench for name in names for bench in benches if bench.name == name]
    if any(
        str(data) in bench.arguments and not has_record(bench, options.out) for bench in benches
    ):
        prepare_python(data)
    outcomes: dict[str, str] = {}
    for bench in benches:
        seconds = min(deadline - time.monotonic(), bench.seconds)
        outcomes[bench.name] = run(bench, options.device, options.out, seconds)
        print(f"=== {bench.name}: {outcomes[bench.name]}\n", flush=True)
    print(json.dumps({"benches": outcomes}))
    return int(not outcomes or any("failed" in outcome for outcome in outcomes.values()))


def run(bench: Bench, device: str, out: Path, seconds: float) -> str:
    """Run one benchmark, unless it has a finished record, and return its outcome."""
    if has_record(bench, out):
        return "has a record"
    if seconds < SKIP_SECONDS:
        return "skipped: no time left"
    if not bench.continues:
        keep_stopped(out / f"{bench.name}.json")
    command = bench.list_command(device, out)
    print(f"=== {bench.name}: {' '.join(command[1:])}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait()
    return f"done in {time.monotonic() - start:.0f} s" if code == 0 else f"failed with code {code}"


def keep_stopped(record: Path) -> None:
    """Rename an unfinished record, which a second run would replace after its first value."""
    number = len(list(record.parent.glob(f"{record.stem}-stopped-*.json")))
    with suppress(FileNotFoundError):
        record.rename(record.with_name(f"{record.stem}-stopped-{number}.json"))


def has_record(bench: Bench, out: Path) -> bool:
    """Return whether the folder holds the benchmark's finished record."""
    path = out / f"{bench.name}.json"
    return path.exists() and "unfinished" not in json.loads(path.read_text())["answer"]


if __name__ == "__main__":
    sys.exit(main())
