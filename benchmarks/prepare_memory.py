"""Measure peak memory and speed of `prepare`: `python -m benchmarks.prepare_memory --megabytes
1000`.

The memory is the resident memory of all processes; shared pages count once per process. Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.data import make_documents
from tests.processes import family


def count_resident_bytes(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # it has ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()
    peak = processes = 0
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name) / "corpus.txt"
        with corpus.open("w", encoding="utf-8") as file:
            file.writelines(make_documents(options.megabytes * 10**6))
        arguments = [sys.executable, "-m", "megatoken", "prepare", str(corpus)]
        arguments += ["--out", f"{name}/out", "--tokenizer", options.tokenizer]
        start = time.monotonic()
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            running = list(family(process.pid))
            peak = max(peak, sum(map(count_resident_bytes, running)))
            processes = max(processes, len(running))
            time.sleep(0.02)
        seconds = time.monotonic() - start
        assert process.returncode == 0
    result = {
        "megabytes": options.megabytes,
        "peak_resident_megabytes": round(peak / 1e6),
        "processes": processes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(options.megabytes / seconds, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
