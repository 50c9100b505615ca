"""Single bits flipped in checkpoints and in a dataset: each must be found. Prints one JSON line at the end.

    python -m tests.soak.flip_soak --flips 10000 --clean 1000

Two runs with two checkpoints each, one with whole tensors and one with the slices of three ranks, and a prepared
dataset with its tokenizer. A flip takes a random file and a random bit of it. Found means: the error
names that file, and of a checkpoint the one before is chosen; of a dataset's tokenizer its folder is named. Clean loads
verify and load the same files; none may raise or warn.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from megatoken.cli.verify import verify_folder
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import INPUTS_NAME
from megatoken.store.commit import find_newest, step_folder
from megatoken.store.load import load_checkpoint_model
from megatoken.text.prepare import prepare
from tests.flip import flip_bit
from tests.ranks import train_on_ranks
from tests.soak.options import parse_options, report
from tests.soak.tiny_job import list_files
from tests.tiny_run import write_shards

STEPS = (1, 2)


def write_runs(folder: Path) -> dict[str, Path]:
    """Train two steps in one process, and in three that split weights and moments."""
    data = write_shards(folder / "shards")
    settings = data, f"budget.steps={STEPS[-1]} save.every=1steps"
    train_on_ranks(1, folder / "whole", *settings)
    train_on_ranks(3, folder / "sharded", *settings, "machine.sharding=zero3")
    return {name: folder / name / "checkpoints" for name in ("whole", "sharded")}


def write_data(folder: Path) -> Path:
    """A prepared dataset of several shards and a trained tokenizer."""
    corpus, data = folder / "corpus.txt", folder / "data"
    corpus.write_text("".join(f"the {n} cats sat on mat {n * n}. " for n in range(30_000)))
    prepare(corpus, data, tokenizer="bpe:300", workers=1, shard_tokens=150_000)
    return data


def flip_bits(
    folder: Path, flips: int, rng: random.Random, find: Callable[[Path], str]
) -> dict[str, int]:
    """Flip one random bit of a random file below a folder at a time, and restore it; count what `find` answers."""
    files = [path for path in list_files(folder) if path.name != INPUTS_NAME]
    found = Counter()
    for _ in range(flips):
        path = rng.choice(files)
        bit = rng.randrange(path.stat().st_size * 8)
        flip_bit(path, bit)
        found[find(path)] += 1
        flip_bit(path, bit)
    return {"flips": flips, **dict(sorted(found.items()))}


def find_in_checkpoint(root: Path, path: Path) -> str:
    """Return "found" when the file is named and the checkpoint before is the one to use."""
    errors = []
    valid = find_newest(root, lambda folder, error: errors.append(str(error)))
    is_older = valid is not None and valid[0] == step_folder(root, STEPS[0])
    return "found" if is_older and len(errors) == 1 and str(path) in errors[0] else "missed"


def find_in_data(data: Path, path: Path) -> str:
    """Return "found" when the file is named; of the tokenizer its folder."""
    errors = [str(error) for error in verify_folder(data).errors]
    if path.parent.name == "tokenizer":
        return "found" if errors and str(path.parent) in errors[0] else "missed"
    return "found" if len(errors) == 1 and str(path) in errors[0] else "missed"


def load_clean(roots: dict[str, Path], data: Path, loads: int) -> dict[str, int]:
    """Verify and load undamaged files, checkpoints and data in turn; count what is reported."""
    alarms = []
    for place in islice(cycle([data, *roots.values()]), loads):
        if place == data:
            alarms.extend(verify_folder(data).errors)
            load_dataset(data).train.read(0, 1000)
        else:
            valid = find_newest(place, lambda _, error: alarms.append(error))
            load_checkpoint_model(*valid)
    return {"loads": loads, "false_alarms": len(alarms)}


def soak(folder: Path, flips: int, clean: int, seed: int) -> dict[str, dict[str, int]]:
    """Flips over three places, a third each, and clean loads; the record."""
    rng, roots, data = random.Random(seed), write_runs(folder), write_data(folder)
    answer = {}
    for name, root in roots.items():
        newest = step_folder(root, STEPS[-1])
        answer[name] = flip_bits(newest, flips // 3, rng, partial(find_in_checkpoint, root))
    rest = flips - len(roots) * (flips // 3)
    answer["data"] = flip_bits(data, rest, rng, partial(find_in_data, data))
    answer["clean"] = load_clean(roots, data, clean)
    return answer


def main() -> int:
    options = parse_options(__doc__, flips=10_000, clean=1_000, seed=0)
    with tempfile.TemporaryDirectory() as name:
        answer = soak(Path(name), options.flips, options.clean, options.seed)
    is_missed = any("missed" in counts for counts in answer.values())
    is_good = not answer["clean"]["false_alarms"] and not is_missed
    return report("flip", is_good, **answer)


if __name__ == "__main__":
    sys.exit(main())
