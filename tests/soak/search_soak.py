"""Random cases for hours: settings that must train alike, files that must be prepared alike.

    python -m tests.soak.search_soak --what settings --hours 1 --seed 0
    python -m tests.soak.search_soak --what files
    python -m tests.soak.search_soak --what bits > before.txt; ... > after.txt

Settings are trained in one piece, in pieces and on other processes; shards are compared with a
second reader's. Prints a line per case, whose seed makes it again, then one JSON line: cases by
result. Settings are "same" or "refused"; anything else is a fault. Bits are hashes of runs that are
killed and resumed, with fixed kernels: a change that keeps them prints the same lines on the same
machine.
"""

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from megatoken.base.errors import ConfigError
from megatoken.data.shard_format import hash_bytes
from tests.soak.options import parse_options, report
from tests.text import random_corpora
from tests.tiny_run import fingerprint
from tests.train.search import Case, write_data


def try_settings(seed: int, folder: Path) -> str:
    write_data(folder)
    case = Case(random.Random(seed), folder)
    print(case, flush=True)
    try:
        case.check(Path(tempfile.mkdtemp(dir=folder)))
    except Exception as error:
        if ConfigError.__name__ in str(error):
            return f"refused: {str(error).splitlines()[-1]}"
        raise
    return "same"


FIXED = (
    " machine.threads=1 machine.attention=flash machine.gemm_backend=torch machine.adamw=fused "
    "machine.fused=off machine.master_weights=off machine.precision=fp32 machine.micro_batch=2"
)


def hash_bits(seed: int, folder: Path) -> str:
    write_data(folder)
    case = Case(random.Random(seed), folder)
    case.settings += FIXED
    case.train(folder / "run", kill=case.kill)
    case.train(folder / "run")
    return f"bits: {hash_bytes(json.dumps(fingerprint(folder / 'run')).encode())}"


def main() -> int:
    options = parse_options(__doc__, what="settings", hours=1.0, seed=0)
    os.nice(10)
    attempts = {"settings": try_settings, "files": random_corpora.check, "bits": hash_bits}
    attempt = attempts[options.what]
    end = time.monotonic() + options.hours * 3600
    counts = Counter()
    seed = options.seed
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = attempt(seed, Path(folder))
            except Exception:  # an AssertionError, or a fault of the program
                result = f"fault: {traceback.format_exc()}"
        counts[result.partition(":")[0]] += 1
        print(seed, result, flush=True)
        seed += 1
    seeds = [options.seed, seed - 1]
    return report("search", not counts["fault"], what=options.what, seeds=seeds, counts=counts)


if __name__ == "__main__":
    sys.exit(main())
