"""Train without pauses and measure the median tokens/s, optionally interleaved with other programs.

    python -m benchmarks.sustained --device cuda --data FOLDER [--llmc train_gpt2cu]
        [--nanogpt CHECKOUT] [--transformers]

Each turn is a separate run on the same shards: `megatoken train` without validation, checkpoints
and samples; llm.c's CUDA program, with and without recomputation; nanoGPT's and transformers' GPT-2
compiled, on batches of our loader, which read their loss every 10 steps as nanoGPT's train.py does.
The first steps of a turn are not counted. nvidia-smi samples clock, power and memory. Needs no
installation: PYTHONPATH=src. Prints a JSON line after each turn; the last one is complete.
`llmc_cuda.sh` builds llm.c.
"""

import argparse
import json
import multiprocessing
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.arguments import SIZES
from benchmarks.baselines import build_step
from benchmarks.journey import megatoken, prepare_python
from benchmarks.peers import find_file
from megatoken.base.config.load import resolve
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.device import choose_device
from megatoken.base.system.metrics_log import Row, read_metrics
from megatoken.base.system.timing import Timing
from megatoken.data.dataloader import DataLoader, Prefetcher
from megatoken.data.dataset import load_dataset
from megatoken.study.bench.worker import WorkerSpec
from megatoken.study.bench.workload import describe_seconds

SKIPPED_STEPS = 20
FEWEST_STEPS = 40
READ_STEPS = 10  # between two readings of a peer's loss; divides SKIPPED_STEPS
SAMPLE_MS = 500
SENSORS = {"clocks.sm": "clock_mhz", "power.draw": "power_watts", "memory.used": "memory_mib"}
LLMC_STEP = re.compile(r"step +(\d+)/\d+ \| loss ([\d.]+).*\| +([\d.]+) ms \|")
Turn = tuple[list[float], float]  # the seconds of each step that counts, and the last loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--data", type=Path, help="dataset folder (default: the standard library, 4,096 BPE)")
    arg("--device", default="auto")
    arg("--preset", default="gpt2-124m", help="default gpt2-124m, the only one with --llmc")
    arg("--batch-seqs", default="64", metavar="N,...", help="sequences per step (default 64)")
    arg("--micro-batch", type=int, default=64, help="of others; ours is tuned (default 64)")
    arg("--seq-len", type=int, default=1024, help="context (default 1024)")
    arg("--turns", type=int, default=1, help="of each program (default 1)")
    arg("--tokens", type=int, default=18_000_000, help="tokens per turn (default 18 million)")
    arg("--llmc", type=Path, help="llm.c's program train_gpt2cu")
    arg("--nanogpt", type=Path, help="checkout of nanoGPT, or its model.py")
    arg("--transformers", action="store_true", help="time transformers as well")
    arg("settings", nargs="*", metavar="section.field=value", help="of megatoken")
    options = parser.parse_intermixed_args()
    result = describe_options(options) | {"rows": []}
    with tempfile.TemporaryDirectory() as name:
        data = options.data or prepare_python(Path(name) / "data")
        for seqs in map(int, options.batch_seqs.split(",")):
            rows: dict[str, Row] = {}
            for _ in range(options.turns):
                for program in list_programs(options):
                    row = rows.setdefault(program, {"program": program, "batch_seqs": seqs})
                    take_turn(row, options, data, Path(name))
                    shown = [summarize(each, seqs * options.seq_len) for each in rows.values()]
                    print(json.dumps(result | {"rows": result["rows"] + shown}), flush=True)
            result["rows"] += [summarize(each, seqs * options.seq_len) for each in rows.values()]


def describe_options(options: argparse.Namespace) -> Row:
    """Return the record's entries for the model and its precision."""
    config = resolve(options.preset, list_settings(options)).config
    sizes = {name: getattr(config.model, name) for name in SIZES}
    precision = choose_device(config.machine).precision
    described = {"preset": options.preset, "settings": options.settings, "precision": precision}
    return described | sizes


def list_settings(options: argparse.Namespace) -> list[str]:
    """Return the settings of all programs, whatever they train on."""
    settings = ["model.vocab_size=50257", f"model.seq_len={options.seq_len}"]
    return [*settings, f"machine.device={options.device}", *options.settings]


def list_programs(options: argparse.Namespace) -> list[str]:
    """Return the programs in the order of their turns."""
    return [
        "megatoken",
        *(["llm.c -r 0", "llm.c -r 1"] if options.llmc else []),
        *(["nanogpt"] if options.nanogpt else []),
        *(["transformers"] if options.transformers else []),
    ]


def take_turn(row: Row, options: argparse.Namespace, data: Path, folder: Path) -> None:
    """Run the program of a row once and add what was measured, or why a peer failed."""
    if "skipped" in row:
        return
    program, seqs = row["program"], row["batch_seqs"]
    tokens = seqs * options.seq_len
    steps = max(options.tokens // tokens, FEWEST_STEPS)
    recipe = [options.preset, f"data.path={data}", f"budget.steps={steps}"]
    recipe += [f"budget.batch_tokens={tokens}", *list_settings(options)]
    with sample_gpu(options.device) as sensors:
        if program == "megatoken":
            seconds, loss = run_megatoken(recipe, tokens, folder / "run")
            row["micro_batch"] = read_object(folder / "run/machine.json")["micro_batch"]
        elif program.startswith("llm.c"):
            seconds, loss = run_llmc(program, options, data, seqs, steps, folder)
        else:
            spec = build_spec(program, options, seqs)
            try:
                seconds, loss = run_peer(spec, data, steps)
            except Exception as error:  # models, compilers and memory fail in many ways
                row["skipped"] = f"{type(error).__name__}: {error!s:.300}"
                return
    row.setdefault("turns", []).append({"seconds": median(seconds), "loss": loss})
    row["turns"][-1] |= {"steps": len(seconds), **sensors}
    row.setdefault("all_seconds", []).extend(seconds)


def run_megatoken(recipe: list[str], tokens: int, out: Path) -> Turn:
    """Run `megatoken train`."""
    shutil.rmtree(out, ignore_errors=True)
    settings = ["log.every=1", "save.every=0", "evaluate.tokens=0", "sample.every=0"]
    settings += ["log.plots=false", "optim.warmup=10steps"]
    command = [*megatoken("train", recipe[0], *settings, *recipe[1:]), "--out", str(out)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [row for row in read_metrics(out) if row["kind"] == "train"]
    counted = [row for row in rows if row["step"] > SKIPPED_STEPS and row["tokens_per_second"]]
    return [tokens / row["tokens_per_second"] for row in counted], rows[-1]["loss"]


def run_llmc(
    program: str, options: argparse.Namespace, data: Path, seqs: int, steps: int, folder: Path
) -> Turn:
    """Run llm.c's program on the shards."""
    shards = str(data.absolute() / "train_*.bin")
    micro_batch = min(options.micro_batch, seqs)
    arguments = f"-e d12 -b {micro_batch} -t {options.seq_len} -d {seqs * options.seq_len}"
    arguments += f" -x {steps} -v 1000000 -m 1 -s 0 -l 0.0006 -c 0.1 -u 10 -q 0"
    arguments += program.removeprefix("llm.c")
    command = [str(options.llmc.absolute()), "-i", shards, "-j", shards, *arguments.split()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder)
    logged = [LLMC_STEP.search(line) for line in done.stdout.splitlines()]
    found = [match for match in logged if match and int(match[1]) > SKIPPED_STEPS]
    return [1e-3 * float(match[3]) for match in found], float(found[-1][2])


def build_spec(program: str, options: argparse.Namespace, seqs: int) -> WorkerSpec:
    """Return the compiled step of another program, with the sizes and precision of ours."""
    config = resolve(options.preset, list_settings(options)).config
    device = choose_device(config.machine)
    source = find_file(program, options.nanogpt) if program == "nanogpt" else ""
    return WorkerSpec(
        model_config=config.model.resolve(config.model.vocab_size),
        batch_seqs=seqs,
        micro_batch=min(options.micro_batch, seqs),
        device=str(device.torch_device),
        name=program,
        options={"source": source, "precision": device.precision, "compile": True},
    )


def run_peer(spec: WorkerSpec, data: Path, steps: int) -> Turn:
    """Train another program in a process that starts with torch's defaults."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(train_peer, spec, data, steps).result()


def train_peer(spec: WorkerSpec, data: Path, steps: int) -> Turn:
    """Train another program without waiting for it, except every READ_STEPS steps."""
    device, step = build_step(spec)
    tokens = load_dataset(str(data)).train
    loader = DataLoader(tokens, spec.model_config.seq_len, spec.batch_seqs, seed=0)
    batches = Prefetcher(loader, device.torch_device)
    seconds: list[float] = []
    start = time.perf_counter()
    for number in range(steps // READ_STEPS * READ_STEPS):
        mean_loss = step(batches.get(number))
        if (number + 1) % READ_STEPS == 0:
            loss = float(mean_loss)
            now = time.perf_counter()
            seconds += [(now - start) / READ_STEPS] * READ_STEPS
            start = now
    batches.close()
    return seconds[SKIPPED_STEPS:], loss


def summarize(row: Row, tokens: int) -> Row:
    """Return a program's row with the median of all its turns' steps."""
    if "all_seconds" not in row:
        return row
    timing = Timing(tuple(row["all_seconds"]))
    summary = {key: value for key, value in row.items() if key != "all_seconds"}
    speed = {"step_seconds": describe_seconds(timing), "tokens_per_second": timing.rate(tokens)}
    return summary | {"batch_tokens": tokens} | speed


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
