"""Random files in random forms: the shards hold what a second reader finds."""

from collections import Counter
from pathlib import Path

from tests.text.random_corpora import check


def test_random_corpora_are_prepared_as_a_second_reader_reads_them(tmp_path: Path):
    endings = Counter(check(seed, tmp_path / str(seed)) for seed in range(40))
    assert endings["text"] > endings["refused"]
