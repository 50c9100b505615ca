"""Train without pauses and measure the median tokens/s, optionally in turns with llm.c on CUDA.

    python -m benchmarks.sustained --device cuda --data FOLDER [--llmc train_gpt2cu]

Each turn is a run of its own on the same shards: `megatoken train` with validation, checkpoints and
samples off, or llm.c's program, with and without recomputation. The first steps of a turn are not
counted. Clock, power and memory are sampled by nvidia-smi. Needs no installation: PYTHONPATH=src.
Prints a JSON line after each turn; the last one is complete. `llmc_cuda.sh` builds llm.c.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.journey import megatoken, prepare_python
from megatoken.base.system.metrics_log import Row, read_metrics
from megatoken.base.system.timing import Timing
from megatoken.study.bench.workload import describe_seconds

SKIPPED_STEPS = 20
FEWEST_STEPS = 40
SAMPLE_MS = 500
SENSORS = {"clocks.sm": "clock_mhz", "power.draw": "power_watts", "memory.used": "memory_mib"}
LLMC_STEP = re.compile(r"step +(\d+)/\d+ \| loss ([\d.]+).*\| +([\d.]+) ms \|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--data", type=Path, help="dataset folder (default: the standard library, 4,096 BPE)")
    arg("--device", default="auto")
    arg("--preset", default="gpt2-124m", help="default gpt2-124m, the only one with --llmc")
    arg("--batch-seqs", default="64", metavar="N,...", help="sequences per step (default 64)")
    arg("--micro-batch", type=int, default=64, help="of llm.c; ours is tuned (default 64)")
    arg("--seq-len", type=int, default=1024, help="context (default 1024)")
    arg("--turns", type=int, default=1, help="of each program (default 1)")
    arg("--tokens", type=int, default=18_000_000, help="tokens per turn (default 18 million)")
    arg("--llmc", type=Path, help="llm.c's program train_gpt2cu")
    arg("settings", nargs="*", metavar="section.field=value", help="of megatoken")
    options = parser.parse_intermixed_args()
    result: Row = {"preset": options.preset, "settings": options.settings, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        data = options.data or prepare_python(Path(name) / "data")
        for seqs in map(int, options.batch_seqs.split(",")):
            rows: dict[str, Row] = {}
            for _ in range(options.turns):
                for program in list_programs(options):
                    with sample_gpu(options.device) as sensors:
                        seconds, loss = run(program, options, data, seqs, Path(name))
                    row = rows.setdefault(program, {"program": program, "batch_seqs": seqs})
                    row.setdefault("turns", []).append({"seconds": median(seconds), "loss": loss})
                    row["turns"][-1] |= {"steps": len(seconds), **sensors}
                    row.setdefault("all_seconds", []).extend(seconds)
                    shown = [summarize(each, seqs * options.seq_len) for each in rows.values()]
                    print(json.dumps(result | {"rows": result["rows"] + shown}), flush=True)
            result["rows"] += [summarize(each, seqs * options.seq_len) for each in rows.values()]


def list_programs(options: argparse.Namespace) -> list[str]:
    """Return the programs in the order of their turns."""
    return ["megatoken", *(["llm.c -r 0", "llm.c -r 1"] if options.llmc else [])]


def run(
    program: str, options: argparse.Namespace, data: Path, seqs: int, folder: Path
) -> tuple[list[float], float]:
    """Train; return the seconds of each step that counts, and the last loss."""
    tokens = seqs * options.seq_len
    steps = max(options.tokens // tokens, FEWEST_STEPS)
    if program != "megatoken":
        shards = str(data / "train_*.bin")
        micro_batch = min(options.micro_batch, seqs)
        arguments = f"-e d12 -b {micro_batch} -t {options.seq_len} -d {tokens} -x {steps} -v 1000000 -m 1 -s 0"
        arguments += f" -l 0.0006 -c 0.1 -u 10 -q 0 {program.removeprefix('llm.c ')}"
        command = [str(options.llmc.absolute()), "-i", shards, "-j", shards, *arguments.split()]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
        logged = [LLMC_STEP.search(line) for line in done.stdout.splitlines()]
        found = [match for match in logged if match and int(match[1]) > SKIPPED_STEPS]
        return [1e-3 * float(match[3]) for match in found], float(found[-1][2])
    out = folder / "run"
    shutil.rmtree(out, ignore_errors=True)
    recipe = [options.preset, f"data.path={data}", "model.vocab_size=50257"]
    recipe += [f"model.seq_len={options.seq_len}", f"machine.device={options.device}"]
    recipe += [f"budget.steps={steps}", f"budget.batch_tokens={tokens}", "optim.warmup=10steps"]
    recipe += [
        "log.every=1",
        "save.every=0",
        "evaluate.tokens=0",
        "sample.every=0",
        "log.plots=false",
    ]
    command = [*megatoken("train", *recipe, *options.settings), "--out", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [row for row in read_metrics(out) if row["kind"] == "train"]
    counted = [row for row in rows if row["step"] > SKIPPED_STEPS and row["tokens_per_second"]]
    return [tokens / row["tokens_per_second"] for row in counted], rows[-1]["loss"]


def summarize(row: Row, tokens: int) -> Row:
    """Return a program's row with the median of all its turns' steps."""
    timing = Timing(tuple(row["all_seconds"]))
    summary = {key: value for key, value in row.items() if key != "all_seconds"}
    speed = {"step_seconds": describe_seconds(timing), "tokens_per_second": tokens / timing.median}
    return summary | speed


@contextmanager
def sample_gpu(device: str) -> Iterator[Row]:
    """Yield a dict, filled on exit with medians of the GPU's sensors in the second half.

    It stays empty without nvidia-smi.
    """
    sensors: Row = {}
    if not (program := shutil.which("nvidia-smi")) or device == "cpu":
        yield sensors
        return
    arguments = [program, f"--query-gpu={','.join(SENSORS)}", "--format=csv,noheader,nounits"]
    arguments += ["-lms", str(SAMPLE_MS), "-i", device.partition(":")[2] or "0"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        yield sensors
    finally:
        process.terminate()
        lines = process.communicate()[0].splitlines()
    samples = [line.split(", ") for line in lines[len(lines) // 2 : -1]]
    for name, values in zip(SENSORS.values(), zip(*samples, strict=True), strict=False):
        sensors[name] = median(map(float, values))


if __name__ == "__main__":
    main()
