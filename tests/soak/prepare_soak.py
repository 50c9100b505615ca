"""Kill or fail `prepare` at every system call that touches its output. Needs strace (Linux).

    python -m tests.soak.prepare_soak                  every point
    python -m tests.soak.prepare_soak --sample 20      a random sample

The same command again must give the bytes of an undisturbed preparation. Prints one JSON line.
"""

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.soak.options import parse_options, report
from tests.soak.strace import Point, list_calls, run_traced, trace, try_points
from tests.soak.tiny_job import list_files

FAULTS = ("kill", "ENOSPC", "EIO")
# The command with small chunks, so that a corpus of 60 kB has a dozen of them.
SMALL_CHUNKS = """
import sys
from functools import partial
from megatoken.cli.main import main
from megatoken.text import prepare
prepare.PrepareOptions = partial(prepare.PrepareOptions, chunk_bytes=5000)
sys.exit(main(["prepare", *sys.argv[1:], "--workers", "1"]))
"""
# Many documents of two splits; one document, whose tokens move between the splits at the end.
SCENARIOS = {
    "many": "--tokenizer bpe:300 --shard-tokens 9000 --val-fraction 0.2",
    "one": "--tokenizer bytes --shard-tokens 20000 --val-fraction 0.999",
}


def write_corpus(folder: Path, *, one_file: bool) -> None:
    """Write 15 texts of about 4 kB, in one file or in 15."""
    folder.mkdir()
    for number in range(15):
        with (folder / f"{0 if one_file else number}.txt").open("a") as file:
            for n in range(150):
                print(f"{n} bottles of beer on wall {number * n}", file=file)


def check_equal(folder: Path, reference: Path) -> None:
    """Check that two folders have the same files with the same bytes."""
    found, expected = (
        {(str(path.relative_to(each)), path.read_bytes()) for path in list_files(each)}
        for each in (folder, reference)
    )
    assert found == expected, {name for name, _ in found ^ expected}


def run_calls(folder: Path, options: Namespace) -> dict[str, Any]:
    """Disturb small preparations at each of their system calls on the output, and repeat them."""
    points = []
    for scenario in SCENARIOS:
        write_corpus(folder / scenario, one_file=scenario == "one")
        log = folder / f"{scenario}.log"
        out = folder / f"{scenario}-undisturbed"
        for call, number in list_output_calls(
            trace(prepare_small(folder, scenario, out), log), out
        ):
            points += [Point(scenario, call, number, fault) for fault in FAULTS]
    return try_points(points, partial(try_point, folder), options)


def try_point(folder: Path, point: Point) -> str:
    """Disturb a preparation at one call, repeat it, and return how the first one ended."""
    out = folder / str(point)
    log = out.with_suffix(".log")
    words = prepare_small(folder, point.scenario, out)
    done = run_traced(words, log, point)
    assert (point.call, point.number) in list_output_calls(list_calls(log), out), (
        "hit something else"
    )
    code = done.returncode
    if point.fault == "kill":
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), code
    elif code != 0:
        assert code in (3, 5), f"exit code {code}: {done.stderr}"
        (line,) = re.findall(".*error: .*", done.stderr)
        assert str(out) in line
        assert "Traceback" not in done.stderr, done.stderr
    again = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, f"the second time: {again.stderr}"
    check_equal(out, folder / f"{point.scenario}-undisturbed")
    shutil.rmtree(out)
    log.unlink()
    return "killed" if point.fault == "kill" else f"exit {code}"


def prepare_small(folder: Path, scenario: str, out: Path) -> list[str]:
    line = f"{folder}/{scenario} --out {out} {SCENARIOS[scenario]}"
    return [sys.executable, "-P", "-c", SMALL_CHUNKS, *line.split()]


def list_output_calls(calls: Iterable[tuple[str, int, str]], out: Path) -> list[tuple[str, int]]:
    """Return (name, number among calls of that name) of each call on the output folder."""
    pattern = re.compile(rf"[\"<]{re.escape(str(out))}[\"/>]")
    return [(call, number) for call, number, line in calls if pattern.search(line)]


def main() -> int:
    options = parse_options(__doc__, sample=0, jobs=2, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        result = run_calls(Path(folder).resolve(), options)
    return report("prepare", not result["failures"], **vars(options), **result)


if __name__ == "__main__":
    sys.exit(main())
