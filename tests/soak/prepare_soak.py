"""Soak of `prepare`: kills at random, kills and errors at every system call that touches the output, memory.

    python -m tests.soak.prepare_soak kills  --kills 100
    python -m tests.soak.prepare_soak calls  --sample 0          (0: every point; needs Linux with strace)
    python -m tests.soak.prepare_soak memory --megabytes 1000 --form txt      (txt, jsonl or files)

Each ends in one line of JSON. The corpora are made from the standard library's own words, always the same. `gpt2` needs
its vocabulary on this machine; --tokenizer chooses another. `megatoken bench prepare` measures the speed.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.data import make_documents, write_jsonl
from tests.processes import family, wait_for_group

CALLS = (
    "?open,openat,?creat,write,?pwrite64,?writev,fsync,?fdatasync,?rename,?renameat,?renameat2,?unlink,?unlinkat,"
    "?rmdir,?mkdir,?mkdirat,ftruncate,?flock"
)
INJECTED = {"kill": "signal=SIGKILL", "ENOSPC": "error=ENOSPC", "EIO": "error=EIO"}
# The command with small chunks, so that a corpus of 60 kB has a dozen of them.
SMALL_CHUNKS = """
import sys
from megatoken.cli.main import main
from megatoken.data import corpus_reader, documents
corpus_reader.CHUNK_BYTES = documents.CHUNK_BYTES = 5000
sys.exit(main(["prepare", *sys.argv[1:], "--workers", "1"]))
"""
# Many documents of two splits; one document, whose tokens are moved between the splits at the end.
SCENARIOS = {
    "many": (
        "files",
        ["--tokenizer", "bpe:300", "--shard-tokens", "9000", "--val-fraction", "0.2"],
    ),
    "one": ("txt", ["--tokenizer", "bytes", "--shard-tokens", "20000", "--val-fraction", "0.999"]),
}


def write_corpus(folder: Path, total_bytes: int, form: str) -> None:
    if form == "files":
        for number, text in enumerate(make_documents(total_bytes)):
            parent = folder / f"{number // 1000:04d}"
            parent.mkdir(exist_ok=True)
            (parent / f"{number:07d}.txt").write_text(text, encoding="utf-8")
        return
    if form == "jsonl":
        write_jsonl(folder / "corpus.jsonl", make_documents(total_bytes))
        return
    with (folder / "corpus.txt").open("w", encoding="utf-8") as file:
        file.writelines(make_documents(total_bytes))


def start_preparing(
    corpus: Path, out: Path, arguments: argparse.Namespace
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-P",
        "-m",
        "megatoken",
        "prepare",
        str(corpus),
        "--out",
        str(out),
        "--json",
    ]
    command += ["--tokenizer", arguments.tokenizer, "--workers", str(arguments.workers)]
    command += ["--shard-tokens", str(arguments.shard_tokens)]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def hash_folder(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_kills(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill the parent, or one of its processes, at random moments; the folder must equal the uninterrupted one."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, arguments.megabytes * 10**6, arguments.form)
    started = time.monotonic()
    assert start_preparing(corpus, folder / "whole", arguments).wait() == 0
    whole_seconds = time.monotonic() - started
    draw, rounds, orphans = random.Random(arguments.seed), 0, 0
    kills: Counter[str] = Counter()
    expected = hash_folder(folder / "whole")
    while kills.total() < arguments.kills:
        out = folder / f"killed{rounds}"
        rounds += 1
        while True:
            child = start_preparing(corpus, out, arguments)
            try:
                code = child.wait(
                    draw.uniform(0, whole_seconds) if kills.total() < arguments.kills else None
                )
            except subprocess.TimeoutExpired:
                workers = list(family(child.pid))[1:] if kills.total() % 2 else []
                victim = draw.choice(workers or [child.pid])
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                code = child.wait(60)
                kills["worker" if workers else "parent"] += 1
                orphans += wait_for_group(child.pid, seconds=5)
                if code == (7 if workers else -signal.SIGKILL):
                    continue
            assert code == 0, (
                f"exit code {code} after {kills.total()} kills"
            )  # also when all was done before the kill
            break
        actual = hash_folder(out)
        assert actual == expected, {
            name for name in actual | expected if actual.get(name) != expected.get(name)
        }
        shutil.rmtree(out)
    return {
        "killed": dict(kills),
        "runs_finished": rounds,
        "byte_identical": True,
        "orphans": orphans,
    }


def run_calls(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill or fail `prepare` at each of its system calls on the output; the same command must then give the same bytes.

    A point that fails is listed with its reason; the soak goes on.
    """
    points, outcomes, failures = [], Counter[str](), []
    for scenario, (form, _) in SCENARIOS.items():
        (folder / scenario).mkdir()
        write_corpus(folder / scenario, 60_000, form)
        log, out = folder / f"{scenario}.log", folder / f"{scenario}-whole"
        done = trace(folder, scenario, out, log)
        assert done.returncode == 0, done.stderr
        calls = list_calls(log, out)
        points += [(scenario, call, n, injected) for call, n in calls for injected in INJECTED]
    total = len(points)
    draw = random.Random(arguments.seed)
    points = draw.sample(points, arguments.sample) if 0 < arguments.sample < total else points
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tries = [pool.submit(try_point, folder, *point) for point in points]
        for point, attempt in zip(points, tries, strict=True):
            try:
                outcomes[f"{point[0]} {point[3]} {attempt.result()}"] += 1
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failures.append(f"{point}: {error}")
    return {
        "points": total,
        "tried": len(points),
        "outcomes": dict(sorted(outcomes.items())),
        "failures": failures,
    }


def try_point(folder: Path, scenario: str, call: str, n: int, injected: str) -> str:
    """Disturb one preparation at one call, and run it again: how it ended at first. Raises AssertionError."""
    out = folder / f"{scenario}-{call}-{n}-{injected}"
    log = out.with_suffix(".log")
    done = trace(folder, scenario, out, log, "-e", f"inject={call}:{INJECTED[injected]}:when={n}")
    assert (call, n) in list_calls(log, out), "hit something else"
    if injected == "kill":
        assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL), (
            f"exit code {done.returncode}"
        )
        outcome = "killed"
    elif done.returncode == 0:
        outcome = "done"
    else:
        lines = [line for line in done.stderr.splitlines() if "error: " in line]
        assert done.returncode in (3, 5), f"exit code {done.returncode}: {done.stderr[-400:]}"
        assert len(lines) == 1, done.stderr[-400:]
        assert str(out) in lines[0], lines[0]
        assert "Traceback" not in done.stderr, done.stderr[-400:]
        outcome = f"exit {done.returncode}"
    again = subprocess.run(
        prepare_small(folder, scenario, out), capture_output=True, text=True, timeout=120
    )
    assert again.returncode == 0, f"the second time: {again.stderr[-400:]}"
    actual, expected = hash_folder(out), hash_folder(folder / f"{scenario}-whole")
    assert actual == expected, {
        name for name in actual | expected if actual.get(name) != expected.get(name)
    }
    shutil.rmtree(out)
    log.unlink()
    return outcome


def prepare_small(folder: Path, scenario: str, out: Path) -> list[str]:
    return [
        sys.executable,
        "-P",
        "-c",
        SMALL_CHUNKS,
        str(folder / scenario),
        "--out",
        str(out),
        *SCENARIOS[scenario][1],
    ]


def trace(
    folder: Path, scenario: str, out: Path, log: Path, *injection: str
) -> subprocess.CompletedProcess[str]:
    """Run a small preparation under strace. Without -f: its first thread makes all calls on the output."""
    strace = [
        "strace",
        "-y",
        "-s",
        "200",
        "-o",
        str(log),
        "-e",
        f"trace={CALLS}",
        "-e",
        "signal=none",
        *injection,
    ]
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "RAYON_NUM_THREADS": "1",
    }
    command = [*strace, *prepare_small(folder, scenario, out)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def list_calls(log: Path, out: Path) -> list[tuple[str, int]]:
    """Each call on the output folder: its name, and its number among those of its name."""
    counts: Counter[str] = Counter()
    calls = []
    for line in log.read_text(errors="replace").splitlines():
        if match := re.match(r"([a-z0-9_]+)\(", line):
            counts[match[1]] += 1
            if re.search(rf"[\"<]{re.escape(str(out))}[\"/>]", line):
                calls.append((match[1], counts[match[1]]))
    return calls


def run_memory(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak resident memory of all processes, summed: shared pages count once per process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, arguments.megabytes * 10**6, arguments.form)
    started, peak, processes = time.monotonic(), 0, 0
    child = start_preparing(corpus, folder / "out", arguments)
    while child.poll() is None:
        running = list(family(child.pid))
        peak, processes = max(peak, sum(map(resident_bytes, running))), max(processes, len(running))
        time.sleep(0.02)
    assert child.returncode == 0
    seconds = time.monotonic() - started
    return {
        "peak_resident_megabytes": round(peak / 1e6),
        "processes": processes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(arguments.megabytes / seconds, 1),
    }


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["kills", "calls", "memory"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--sample", type=int, default=0, help="points of `calls` to try; 0: all")
    parser.add_argument("--jobs", type=int, default=2, help="points of `calls` at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--form", choices=["txt", "jsonl", "files"], default="txt")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--shard-tokens", type=int)
    arguments = parser.parse_args()
    megabytes, shard_tokens = {"kills": (15, 10**6), "calls": (0, 0), "memory": (1000, 10**8)}[
        arguments.what
    ]
    arguments.megabytes, arguments.shard_tokens = (
        arguments.megabytes or megabytes,
        arguments.shard_tokens or shard_tokens,
    )
    run = {"kills": run_kills, "calls": run_calls, "memory": run_memory}[arguments.what]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder).resolve(), arguments)
    print(json.dumps(vars(arguments) | {"seconds": round(time.monotonic() - started, 1)} | result))
    return int(bool(result.get("failures") or result.get("orphans")))


if __name__ == "__main__":
    sys.exit(main())
