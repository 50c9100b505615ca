"""Prepare random files in random forms for an hour, and compare the shards with a second reader.

    python -m tests.soak.data_soak --hours 1 --seed 0

A failure is printed with its seed, which makes the same files again. Prints one JSON line.
"""

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import count
from pathlib import Path

from tests.data.random_corpora import check
from tests.soak.options import parse_options, report


def main() -> int:
    options = parse_options(__doc__, hours=1.0, seed=0)
    end = time.monotonic() + 3600 * options.hours
    endings: Counter[str] = Counter()
    failures: list[int] = []
    for seed in count(options.seed):
        if time.monotonic() > end:
            break
        folder = Path(tempfile.mkdtemp())
        try:
            endings[check(seed, folder)] += 1
        except Exception:  # an AssertionError, or a fault of `prepare`
            print(f"seed {seed}\n{traceback.format_exc()}", flush=True)
            failures.append(seed)
        shutil.rmtree(folder)
    return report("data", not failures, **vars(options), endings=endings, failures=failures)


if __name__ == "__main__":
    sys.exit(main())
