"""Random settings, trained in one piece, in pieces and on other processes, for hours.

    python -m tests.soak.search_soak --hours 1 --seed 0

Prints a line per case, then one JSON line: cases by result. A case is "same", "refused" or a fault.
"""

import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.soak.options import parse_options, report
from tests.train.search import Case, write_data


def try_case(case: Case, folder: Path) -> str:
    """Return "same", or what is wrong."""
    try:
        case.check(folder)
    except Exception as error:
        text = str(error)
        is_refused = "errors.ConfigError" in text
        return f"refused: {text.splitlines()[-1]}" if is_refused else f"fault: {text}"
    return "same"


def main() -> int:
    options = parse_options(__doc__, hours=1.0, seed=0)
    os.nice(10)
    end = time.monotonic() + options.hours * 3600
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        write_data(data)
        seed = options.seed
        while time.monotonic() < end:
            case = Case(random.Random(seed), data)
            with tempfile.TemporaryDirectory(dir=data) as folder:
                result = try_case(case, Path(folder))
            counts[result.partition(":")[0]] += 1
            print(seed, result if result == "same" else f"{result}\n    {case}", flush=True)
            seed += 1
    return report("search", not counts["fault"], seeds=[options.seed, seed - 1], **counts)


if __name__ == "__main__":
    sys.exit(main())
