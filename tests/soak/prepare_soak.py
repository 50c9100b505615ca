"""What preparing a corpus must stand, measured: kills, memory, speed. Run by hand; minutes, not seconds.

    python tests/soak/prepare_soak.py kills  --kills 20
    python tests/soak/prepare_soak.py memory --megabytes 1000 --form txt      (txt, jsonl or files)
    python tests/soak/prepare_soak.py speed  --megabytes 100

Each ends in one line of JSON. The corpora are made on the fly from the standard library's own words, always
the same. `gpt2` needs its vocabulary on this machine; --tokenizer chooses another.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import xxhash

from megatoken.data.prepare import prepare
from megatoken.data.sources import find_source
from megatoken.data.tokenizer import load_tokenizer
from megatoken.hardware import cpu_count

DOCUMENT_BYTES = 4000  # on average


def make_documents(total_bytes: int) -> Iterator[str]:
    """English-like text: lines of the standard library, shuffled, with fresh words mixed in as real corpora have."""
    files = find_source("python").files
    lines = [line for file in files for line in Path(file.path).read_text("utf-8", "replace").splitlines() if line]
    draw = np.random.default_rng(0)
    made = 0
    while made < total_bytes:
        chosen = draw.integers(len(lines), size=int(draw.integers(20, 180)))
        fresh = "".join(map(chr, draw.integers(ord("a"), ord("z") + 1, size=9)))
        text = "\n".join(lines[at] for at in chosen) + f"\n{fresh} was here — {made}.\n"
        made += len(text)
        yield text


def write_corpus(folder: Path, total_bytes: int, form: str) -> None:
    if form == "files":
        for number, text in enumerate(make_documents(total_bytes)):
            place = folder / f"{number // 1000:04d}"
            place.mkdir(exist_ok=True)
            (place / f"{number:07d}.txt").write_text(text, encoding="utf-8")
        return
    with (folder / f"corpus.{form}").open("w", encoding="utf-8") as file:
        for text in make_documents(total_bytes):
            file.write(json.dumps({"text": text}) + "\n" if form == "jsonl" else text)


def start_preparing(corpus: Path, out: Path, arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    program = (
        "import sys; from pathlib import Path; from megatoken.data.prepare import prepare; "
        "prepare(sys.argv[1], Path(sys.argv[2]), tokenizer=sys.argv[3], workers=int(sys.argv[4]),"
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
    """Kills the parent at random moments until it gets through; the folder must equal the uninterrupted one."""
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
        found = hash_folder(out)
        assert found == expected, {name for name in found | expected if found.get(name) != expected.get(name)}
    return {"kills": kills, "runs_finished": rounds, "byte_identical": True, "orphans": orphans}


def count_group(group: int, seconds: float) -> int:
    """Processes of a process group that still run after `seconds`; the dead that nobody has reaped are dead."""
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
            state, _, its_group = path.read_text().rpartition(") ")[2].split()[:3]
        except OSError:
            continue  # it ended meanwhile
        if int(its_group) == group and state != "Z":
            living.append(int(path.parent.name))
    return living


def run_memory(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Peak of the resident memory of all processes, summed: shared pages count once a process."""
    corpus = folder / "corpus"
    corpus.mkdir()
    write_corpus(corpus, arguments.megabytes * 10**6, arguments.form)
    started, peak, most = time.monotonic(), 0, 0
    child = start_preparing(corpus, folder / "out", arguments)
    while child.poll() is None:
        family = list(list_family(child.pid))
        peak, most = max(peak, sum(map(resident_bytes, family))), max(most, len(family))
        time.sleep(0.02)
    assert child.returncode == 0
    seconds = time.monotonic() - started
    return {
        "peak_resident_megabytes": round(peak / 1e6),
        "processes": most,
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


def run_speed(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """`prepare` from file to shards against bare batch encoding of the same documents in memory, best of three."""
    corpus = folder / "corpus"
    corpus.mkdir()
    documents = list(make_documents(arguments.megabytes * 10**6))
    with (corpus / "corpus.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    workers = arguments.workers or cpu_count()
    tokenizer = load_tokenizer(arguments.tokenizer, lambda: iter(documents[:2000]))
    bare = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    contests: dict[str, Callable[[], object]] = {
        "tokenizers": lambda: [encoding.ids for encoding in bare.encode_batch_fast(documents)],
    }
    if arguments.tokenizer == "gpt2":
        import tiktoken

        oracle = tiktoken.get_encoding("gpt2")
        contests["tiktoken"] = lambda: oracle.encode_ordinary_batch(documents, num_threads=workers)
    size = sum(len(text.encode()) for text in documents) / 1e6
    rates: dict[str, list[float]] = {name: [] for name in ("prepare", *contests)}
    for turn in range(3):
        started = time.monotonic()
        prepare(str(corpus), folder / f"out{turn}", tokenizer=arguments.tokenizer, workers=workers)
        rates["prepare"].append(size / (time.monotonic() - started))
        for name, encode in contests.items():
            started = time.monotonic()
            encode()
            rates[name].append(size / (time.monotonic() - started))
    best = {name: round(max(values), 2) for name, values in rates.items()}
    share = {f"share_of_{name}": round(best["prepare"] / best[name], 2) for name in contests}
    return {"megabytes_per_second": best, "workers": workers} | share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "memory", "speed"])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--megabytes", type=int)
    parser.add_argument("--form", choices=["txt", "jsonl", "files"], default="txt")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--shard-tokens", type=int, default=100_000_000)
    arguments = parser.parse_args()
    sizes = {"kills": 60, "memory": 1000, "speed": 100}
    arguments.megabytes = arguments.megabytes or sizes[arguments.what]
    run = {"kills": run_kills, "memory": run_memory, "speed": run_speed}[arguments.what]
    with tempfile.TemporaryDirectory() as folder:
        result = run(Path(folder), arguments)
    print(json.dumps({"what": arguments.what} | vars(arguments) | result))


if __name__ == "__main__":
    main()
