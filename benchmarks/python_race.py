"""Train gpt2-124m and modern-124m on the Python packages of this machine, for minutes each.

    python -m benchmarks.python_race --device cuda --work runs/python-race

The text is every module in site-packages. Some packages are held out, each with all its modules, so
that no module is trained on whose neighbors are held out. `megatoken race --minutes` trains, then
each model is evaluated, next to xz -9 after training text, and sampled. WORK/race/race.png shows
the curves. WORK/state.json keeps finished stages, so the same command continues after a kill. Needs
no installation: PYTHONPATH=src. Prints a JSON line after each stage; the last one is complete.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.journey import PROMPT, run_json
from megatoken.base.config.load import resolve
from megatoken.base.system.atomic_write import read_object, replace_file
from megatoken.base.system.metrics_log import Row, read_metrics
from megatoken.data.dataset import load_dataset
from megatoken.text.commands.quickstart import EVAL_TOKENS, measure_xz
from megatoken.text.prepare import prepare
from megatoken.text.sources import File, Source, find_source

# The recipes warm up for longer than minutes of training take.
CONTENDERS = ("gpt2-124m optim.warmup=0.05dur", "modern-124m optim.momentum_warmup=0.1dur")
VAL_SHARE = 0.02  # of the bytes, about
LARGEST_VAL_SHARE = 0.005  # of a held-out package
PROMPTS = (PROMPT, "import numpy as np\n\n\nclass ", 'if __name__ == "__main__":\n')
SAMPLE_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg = parser.add_argument
    arg("--work", type=Path, required=True, help="folder of the data, the runs and the state")
    arg("--device", default="auto")
    arg("--minutes", type=float, default=5.0, help="of training, per recipe (default 5)")
    arg("--batch-tokens", type=int, default=131_072, help="per step (default 131072)")
    arg("--tokenizer", default="bpe:32768", help="default bpe:32768, trained on the text")
    arg("--packages", type=Path, help="site-packages folder (default: all that Python imports)")
    arg("settings", nargs="*", metavar="section.field=value", help="of both recipes")
    options = parser.parse_intermixed_args()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "state.json"
    state = read_object(path)
    stages: dict[str, Callable[[], Any]] = {
        "data": lambda: prepare_packages(options),
        "compressors": lambda: compress(options),
        "race": lambda: race(options),
        "runs": lambda: [describe_run(contender, options) for contender in CONTENDERS],
    }
    for name, run_stage in stages.items():
        if name not in state:
            state[name] = run_stage()
            replace_file(path, json.dumps(state))
        print(json.dumps(state), flush=True)


def prepare_packages(options: argparse.Namespace) -> Row:
    """Prepare the dataset WORK/data and describe it."""
    folders = [Path(each) for each in sys.path if Path(each).name.endswith("-packages")]
    files: dict[str, File] = {}
    for folder in [options.packages] if options.packages else folders:
        files = {file.name: file for file in find_source("python", folder).files} | files
    train, val = split_packages([*files.values()])
    source = Source("site-packages", (*train, *val))
    result = prepare(source, options.work / "data", tokenizer=options.tokenizer)
    return asdict(result) | {"val_packages": sorted({find_package(file) for file in val})}


def find_package(file: File) -> str:
    """Return the package that a module belongs to, or its own name at the top level."""
    return Path(file.name).parts[0].removesuffix(".py")


def split_packages(files: list[File]) -> tuple[list[File], list[File]]:
    """Divide modules into those to train on and those of held-out packages.

    Small packages are held out in the order of a hash of their names, except those named after
    another, such as aiobotocore. Copies of a held-out package in others, such as pip/_vendor, are
    left out.
    """
    sizes = Counter[str]()
    for file in files:
        sizes[find_package(file)] += file.size
    total = sizes.total()
    held_out: set[str] = set()
    for name in sorted(sizes, key=lambda each: xxhash.xxh3_64_hexdigest(each.encode())):
        is_full = sum(sizes[each] for each in held_out) >= VAL_SHARE * total
        is_derived = any(each in name for each in sizes if each != name)
        if not is_full and not is_derived and sizes[name] <= LARGEST_VAL_SHARE * total:
            held_out.add(name)
    val = [replace(file, split="val") for file in files if find_package(file) in held_out]
    train = [file for file in files if held_out.isdisjoint(name_parts(file))]
    return train, val


def name_parts(file: File) -> list[str]:
    """Return the names of a module's folders and its own."""
    return [part.removesuffix(".py") for part in Path(file.name).parts]


def compress(options: argparse.Namespace) -> Row:
    """Return the bits per byte of xz on the text that `eval` reads."""
    model = resolve("gpt2-124m", options.settings).config.model
    return measure_xz(load_dataset(str(options.work / "data")), model.seq_len)


def race(options: argparse.Namespace) -> Row:
    """Train both recipes, or continue; return what `megatoken race` reports."""
    data = f"data.path={options.work / 'data'}"
    settings = [data, "model.vocab_size=0", f"budget.batch_tokens={options.batch_tokens}"]
    settings += [f"machine.device={options.device}", "save.every=100steps", *options.settings]
    limits = ["--minutes", str(options.minutes), "--seeds", "1", "--turn", "0"]
    out = ["--out", str(options.work / "race")]
    result, _ = run_json("race", *CONTENDERS, *settings, *limits, *out)
    return result


def describe_run(contender: str, options: argparse.Namespace) -> Row:
    """Evaluate and sample a trained model; return both with its validation curve."""
    (run,) = options.work.glob(f"race/{contender.split()[0]}*/seed-*/")
    device = ["--device", options.device]
    limit = ["--split", "val", "--limit", str(EVAL_TOKENS)]
    evaluation, _ = run_json(
        "eval", str(run), "--data", str(options.work / "data"), *limit, *device
    )
    sampled, _ = run_json("sample", str(run), *PROMPTS, "--tokens", str(SAMPLE_TOKENS), *device)
    rows = [row for row in read_metrics(run) if row["kind"] == "val"]
    return {
        "contender": contender,
        "bits_per_byte": evaluation["bits_per_byte"],
        "curve": {key: [row[key] for row in rows] for key in ("tokens", "elapsed_seconds", "loss")},
        "samples": [sample["text"] for sample in sampled["samples"]],
    }


if __name__ == "__main__":
    main()
