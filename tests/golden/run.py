"""Train runs with random settings, each killed and resumed, and record the hash of their bits.

    python -m tests.golden.run record golden.json      # before a change
    python -m tests.golden.run check golden.json       # after it

Kernels are fixed and processes have one thread. The bits depend on the processor, so both commands
must run on the same machine. The settings depend on tests/train/search.py.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.tiny_run import fingerprint
from tests.train.search import Case, write_data

FIXED = (
    "machine.threads=1 machine.attention=flash machine.gemm_backend=torch machine.adamw=fused "
    "machine.fused=off machine.master_weights=off machine.precision=fp32 machine.micro_batch=2"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args()
    expected = json.loads(options.file.read_text()) if options.action == "check" else {}
    found, n_wrong = {}, 0
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        data = Path(name)
        write_data(data)
        for seed in map(str, range(options.runs)):
            case, out = Case(random.Random(int(seed)), data), data / seed / "run"
            case.settings += f" {FIXED}"
            case.train(out, kill=case.kill)
            case.train(out)
            found[seed] = json.loads(json.dumps(fingerprint(out)))
            is_wrong = options.action == "check" and found[seed] != expected[seed]
            n_wrong += is_wrong
            print(seed, "DIFFERENT" if is_wrong else "done", case, flush=True)
    if options.action == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n")
    return min(n_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
