"""Parts: any machines, in any order and with any interruptions, write the same bytes."""

import random
import shutil
from pathlib import Path

import pytest

from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import read_manifest
from megatoken.text import parts
from megatoken.text.commands.prepare import PrepareBar
from tests.conftest import Call
from tests.data.small_dataset import stop_after
from tests.text.test_documents import write
from tests.text.test_prepare import make_corpus, prepare, read_folder, small_chunks

__all__ = ["small_chunks"]  # a fixture


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 500)
    monkeypatch.setenv("MEGATOKEN_CACHE", f"{tmp_path}/cache")


@pytest.mark.fault(35)
@pytest.mark.usefixtures("small_chunks")
def test_machines_and_interruptions_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
):
    source, made = make_corpus(tmp_path / "corpus"), []
    for machines, place in ((1, "{}/1"), (4, "{}/4"), (4, "local://{}/store"), (16, "{}/16")):
        out, draw = place.format(tmp_path), random.Random(machines)
        for part in [1, *draw.sample(range(2, machines + 1), machines - 1)]:  # 1 has the tokenizer
            line = f"prepare {source} --out {out} --part {part}/{machines} --workers 1"
            line += " --tokenizer bpe:300 --val-fraction 0.2 --shard-tokens 2000"
            code = None
            while code != 0:
                stop = stop_after(draw.randrange(1, 30))
                with monkeypatch.context() as patch:
                    patch.setattr(
                        PrepareBar, "update", lambda _, progress, stop=stop: stop(progress)
                    )
                    code = call(line)[0]
        assert call(f"prepare --join {out}")[0] == 0
        made.append(read_folder(Path(out.removeprefix("local://"))))
    assert made[1:] == made[:1] * 3
    assert len(read_manifest(tmp_path / "1").parts) >= 16
    settings = {"val_fraction": 0.2, "tokenizer": f"{tmp_path}/1/tokenizer"}
    prepare(source, tmp_path / "whole", **settings)
    joined, whole = load_dataset(tmp_path / "1"), load_dataset(tmp_path / "whole")
    for one, other in ((joined.train, whole.train), (joined.val, whole.val)):
        ids = one.read(0, len(one)).tolist()
        assert ids[len(one) - len(other) :] == other.read(0, len(other)).tolist()
        assert ids[: len(one) - len(other)] in ([], [joined.vocabulary.eot])
    for name in ("documents", "bytes"):
        assert getattr(joined.manifest, name) == getattr(whole.manifest, name)


def test_missing_and_different_parts_are_named(tmp_path: Path, call: Call):
    for number in range(9):
        write(tmp_path / "in" / f"{number}.txt", f"{number} text " * 500)
    out = tmp_path / "out"
    common = f"prepare {tmp_path}/in --out {out} --workers 1 --val-fraction 0 --tokenizer"
    join = f"prepare --join {out}"

    def refuse(line):
        code, _, error = call(line)
        assert code in (2, 3)
        return error

    assert "1/2" in refuse(f"{common} bpe:300 --part 2/2")
    assert call(f"{common} bytes --part 1/2")[0] == 0
    assert "--part 2/9" in refuse(join)
    assert call(f"{common} bytes --part 2/2 --text-key body")[0] == 0
    assert "part-00002 has text_key body" in refuse(join)
    for path in out.glob("part-*[2468]"):
        shutil.rmtree(path)
    for line in (f"{common} bytes --part 2/2", join, f"{common} bytes"):
        code, printed, _ = call(line)
        assert code == 0
    assert "9 shards: already prepared" in printed
    for part in ("0/2", "3/2", "1", "a/b"):
        refuse(f"{common} bytes --part {part}")
