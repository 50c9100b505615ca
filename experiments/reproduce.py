"""Replay published runs with several seeds, to show which tolerances they need.

    python -m experiments.reproduce notebook-fifty --seeds 3 --pictures records

Prints one JSON line with a row per run and seed: its losses and how they differ. Needs no
installation: PYTHONPATH=src.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from megatoken.base.published import RUNS


def replay(name: str, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run `megatoken reproduce` in a process; return its result, or the error."""
    program = "experiments.unscaled" if options.unscaled else "megatoken"
    command = [sys.executable, "-m", program, "reproduce", name, "--json"]
    command += ["--out", str(folder / f"{name}-{seed}"), f"seed={seed}", *options.settings]
    if options.data:
        command += ["--data", str(options.data)]
    if options.pictures and seed == options.first_seed:
        command += ["--plot", str(options.pictures / f"{options.prefix}{name}.png")]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr, file=sys.stderr, flush=True)
    row = {"name": name, "seed": seed, "exit_code": done.returncode}
    lines = done.stdout.splitlines()
    return row | (json.loads(lines[-1]) if lines else {"error": done.stderr.splitlines()[-1]})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default all of the notebook")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default 1)")
    parser.add_argument("--first-seed", type=int, default=1337)
    parser.add_argument("--data", type=Path, help="tiny Shakespeare (default: download it)")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw the first seed")
    parser.add_argument("--unscaled", action="store_true", help="in fp16 without a loss scale")
    parser.add_argument("--prefix", default="", help="of the pictures' names")
    parser.add_argument(
        "--set", dest="settings", nargs="*", default=[], metavar="section.field=value"
    )
    options = parser.parse_args()
    names = options.names or [name for name in RUNS if name.startswith("notebook")]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    with tempfile.TemporaryDirectory() as folder:
        rows = [replay(name, seed, Path(folder), options) for name in names for seed in seeds]
    print(json.dumps({"runs": rows}))


if __name__ == "__main__":
    main()
