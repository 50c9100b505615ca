"""A corpus prepared in parts, anywhere and in any order, is the corpus prepared at once: byte for byte."""

import random
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatoken.cli import main
from megatoken.data.parts import find_parts, take_part
from megatoken.data.prepare import prepare
from megatoken.data.shards import read_manifest
from megatoken.data.sources import find_source
from megatoken.errors import Exit, Fault
from tests.data.test_prepare import make_corpus, read_folder

SETTINGS = {"tokenizer": "bytes", "workers": 1, "shard_tokens": 30_000, "val_fraction": 0.1}


@pytest.mark.parametrize(("of", "tokenizer"), [(1, "bytes"), (3, "bytes"), (3, "bpe:320"), (40, "bytes")])
def test_parts_change_no_byte(of: int, tokenizer: str, tmp_path: Path) -> None:
    """40 parts of 26 files: some have none."""
    source, settings = str(make_corpus(tmp_path / "corpus")), SETTINGS | {"tokenizer": tokenizer}
    prepare(source, tmp_path / "whole", **settings)
    numbers = list(range(1, of + 1))
    random.Random(of).shuffle(numbers)
    made = [prepare(source, tmp_path / "joined", part=(number, of), **settings) for number in numbers]
    joined = prepare(source, tmp_path / "joined", **settings)
    assert read_folder(tmp_path / "joined") == read_folder(tmp_path / "whole")
    assert joined.documents == sum(part.documents for part in made) > 100
    assert prepare(source, tmp_path / "joined", **settings).unchanged


@pytest.mark.parametrize("val_fraction", [0.001, 0.999])
def test_the_whole_cuts_the_validation_split(val_fraction: float, tmp_path: Path) -> None:
    """Where hashing gives val nothing, or everything, the parts leave it to the whole."""
    source, settings = str(make_corpus(tmp_path / "corpus")), SETTINGS | {"val_fraction": val_fraction}
    prepare(source, tmp_path / "whole", **settings)
    for number in (1, 2):
        prepare(source, tmp_path / "joined", part=(number, 2), **settings)
    prepare(source, tmp_path / "joined", **settings)
    assert read_folder(tmp_path / "joined") == read_folder(tmp_path / "whole")


def test_every_file_is_in_one_part(tmp_path: Path) -> None:
    corpus = find_source(str(make_corpus(tmp_path / "corpus")))
    for of in (1, 2, 7, 100):
        parts = [take_part(corpus, number, of) for number in range(1, of + 1)]
        assert tuple(file for part in parts for file in part.files) == corpus.files
        if of == 2:
            assert max(part.size_bytes for part in parts) < 0.8 * corpus.size_bytes


def test_a_part_goes_on_after_a_stop(tmp_path: Path) -> None:
    """So does putting them together, which begins anew."""
    source = str(make_corpus(tmp_path / "corpus"))
    prepare(source, tmp_path / "whole", **SETTINGS)

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    for part in ((1, 2), (2, 2), None):
        with pytest.raises(KeyboardInterrupt):
            prepare(source, tmp_path / "joined", part=part, on_progress=stop, **SETTINGS)
        prepare(source, tmp_path / "joined", part=part, **SETTINGS)
    assert read_folder(tmp_path / "joined") == read_folder(tmp_path / "whole")


def test_what_is_missing_damaged_or_other_is_named(tmp_path: Path) -> None:
    source, out = str(make_corpus(tmp_path / "corpus")), tmp_path / "out"

    def refuse(**settings: object) -> str:
        with pytest.raises(Fault) as fault:
            prepare(source, out, **SETTINGS | settings)
        assert fault.value.code == Exit.DATA
        return str(fault.value)

    prepare(source, out, part=(2, 3), **SETTINGS)
    assert "parts 1, 3 of 3 are not finished" in refuse()
    prepare(source, out, part=(1, 3), **SETTINGS)
    prepare(source, out, part=(3, 3), **SETTINGS)
    assert "prepared with another val_fraction: 0.1 there, 0.2 now" in refuse(val_fraction=0.2)
    shard = out / "parts" / "00002-of-00003" / read_manifest(find_parts(out)[1][0]).shards[0].file
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "a shard of this part is damaged" in refuse()
    shutil.rmtree(shard.parent)
    prepare(source, out, part=(2, 3), **SETTINGS)
    assert "parts of another division are here, K/3" in refuse(part=(1, 2))
    assert "prepared with another val_fraction: 0.1 there, 0.2 now" in refuse(part=(1, 3), val_fraction=0.2)
    shutil.copytree(shard.parent, out / "parts" / "00001-of-00002")  # of two machines that began at once
    assert "parts of several divisions: 2, 3" in refuse()
    shutil.rmtree(out / "parts" / "00001-of-00002")
    text = next(path for path in sorted(Path(source).rglob("*")) if path.is_file())
    text.touch()
    assert "an input changed after it was prepared" in refuse()
    shutil.rmtree(out / "parts")
    for number in (1, 2, 3):
        prepare(source, out, part=(number, 3), **SETTINGS)
    assert not prepare(source, out, **SETTINGS).unchanged


def test_the_command_line_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = make_corpus(tmp_path / "corpus"), tmp_path / "out"
    words = ["prepare", str(source), "--out", str(out), "--tokenizer", "bytes"]
    assert main([*words, "--part", "1/1"]) == Exit.DONE
    assert "part 1 of 1; when all are done" in capsys.readouterr().out
    assert main(words) == Exit.DONE
    assert not (out / "parts").exists()
    assert main([*words, "--part", "2/1"]) == Exit.CONFIG
    assert "part cannot be 2/1" in capsys.readouterr().err
    assert main([*words, "--part", "half"]) == Exit.CONFIG
    assert "expected K/N" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("datatrove") is None, reason="datatrove is not installed")
def test_the_program_of_the_documentation(tmp_path: Path) -> None:
    """docs/scaling-up.md's, by datatrove's local executor in two processes."""
    source = str(make_corpus(tmp_path / "corpus"))
    prepare(source, tmp_path / "whole", tokenizer="bytes", workers=1)
    page = (Path(__file__).parents[2] / "docs" / "scaling-up.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    for ours, mine in (("text/", source), ("data/mine", str(tmp_path / "joined")), ('"gpt2"', '"bytes"'),
                       ('"workers": 8', '"workers": 1'), ("tasks=16", "tasks=3")):  # fmt: skip
        assert ours in program
        program = program.replace(ours, mine)
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert len(list((tmp_path / "logs" / "prepare" / "completions").iterdir())) == 3
    assert read_folder(tmp_path / "joined") == read_folder(tmp_path / "whole")
