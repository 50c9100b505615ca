"""Soak of `prepare`: kills and memory. Run by hand; minutes, not seconds.

    python tests/soak/prepare_soak.py kills  --kills 20
    python tests/soak/prepare_soak.py memory --megabytes 1000 --form txt      (txt, jsonl or files)

Each ends in one line of JSON. The corpora are made from the standard library's own words, always the same. `gpt2` needs
its vocabulary on this machine; --tokenizer chooses another. `megatoken bench prepare` measures the speed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from megatoken.bench.data import make_documents, write_jsonl


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


def start_preparing(corpus: Path, out: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    program = (
        "import sys; from megatoken.data import prepare;"
        " prepare.prepare(sys.argv[1], sys.argv[2], tokenizer=sys.argv[3], workers=int(sys.argv[4]),"
        " shard_tokens=int(sys.argv[5]))"
    )
    settings = [arguments.tokenizer, str(arguments.workers), str(arguments.shard_tokens)]
    return subprocess.Popen([sys.executable, "-c", program, str(corpus), str(out), *settings], start_new_session=True)


def hash_folder(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run_kills(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kill the parent at random moments until it finishes; the folder must equal the uninterrupted one."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, arguments.megabytes * 10**6, arguments.form)
    started = time.monotonic()
    assert start_preparing(corpus, folder / "whole", arguments).wait() == 0
    whole_seconds = time.monotonic() - started
    draw, kills, rounds, orphans = random.Random(0), 0, 0, 0
    expected = hash_folder(folder / "whole")
    while kills < arguments.kills:
        out = folder / f"killed{rounds}"
        rounds += 1
        while True:
            child = start_preparing(corpus, out, arguments)
            try:
                code = child.wait(draw.uniform(0, whole_seconds) if kills < arguments.kills else None)
            except subprocess.TimeoutExpired:
                os.kill(child.pid, signal.SIGKILL)
                child.wait()
                kills += 1
                orphans += count_group(child.pid, seconds=5)
                continue
            assert code == 0, f"exit code {code} after {kills} kills"
            break
        actual = hash_folder(out)
        assert actual == expected, {name for name in actual | expected if actual.get(name) != expected.get(name)}
    return {"kills": kills, "runs_finished": rounds, "byte_identical": True, "orphans": orphans}


def count_group(group: int, seconds: float) -> int:
    """Processes of a process group that still run after `seconds`, zombies left out."""
    deadline = time.monotonic() + seconds
    while living := list_living(group):
        if time.monotonic() > deadline:
            return len(living)
        time.sleep(0.02)
    return 0


def list_living(group: int) -> list[int]:
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = path.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(process_group) == group and state != "Z":
            living.append(int(path.parent.name))
    return living


def run_memory(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak resident memory of all processes, summed: shared pages count once per process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, arguments.megabytes * 10**6, arguments.form)
    started, peak, processes = time.monotonic(), 0, 0
    child = start_preparing(corpus, folder / "out", arguments)
    while child.poll() is None:
        family = list(list_family(child.pid))
        peak, processes = max(peak, sum(map(resident_bytes, family))), max(processes, len(family))
        time.sleep(0.02)
    assert child.returncode == 0
    seconds = time.monotonic() - started
    return {
        "peak_resident_megabytes": round(peak / 1e6),
        "processes": processes,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(arguments.megabytes / seconds, 1),
    }


def list_family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from list_family(int(child))


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "memory"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--form", choices=["txt", "jsonl", "files"], default="txt")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--shard-tokens", type=int, default=100_000_000)
    arguments = parser.parse_args()
    sizes = {"kills": 60, "memory": 1000}
    arguments.megabytes = arguments.megabytes or sizes[arguments.what]
    run = {"kills": run_kills, "memory": run_memory}[arguments.what]
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), arguments)
    print(json.dumps({"what": arguments.what} | vars(arguments) | result))


if __name__ == "__main__":
    main()
