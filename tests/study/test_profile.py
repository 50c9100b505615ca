"""train --profile: traces of some steps of a run, which trains as without."""

from collections import Counter
from pathlib import Path

import pytest

from megatoken.base.errors import ConfigError
from megatoken.base.system.atomic_write import read_json
from tests.tiny_run import assert_equal_tensors, read_losses, tiny_run, train, write_shards


def test_profiled_steps_are_in_the_trace_and_compute_the_same_bits(tmp_path: Path):
    data = write_shards(tmp_path / "data")
    for name, settings in (
        ("plain", ""),
        ("profiled", "log.profile=4:7"),
        ("late", "log.profile=9:99"),
    ):
        train(tmp_path / name, data, settings)
        assert read_losses(tmp_path / name) == read_losses(tmp_path / "plain")
        assert_equal_tensors(tmp_path / name, tmp_path / "plain")
    folder = tmp_path / "profiled/profile"
    events = read_json(folder / "trace-4-7.json")["traceEvents"]
    names = Counter(event["name"] for event in events)
    assert names["_ChunkedCrossEntropyBackward"] == 3 * 3  # micro-batches
    assert names["[memory]"] > 0
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    table = read_json(folder / "parts-4-7.json")
    seconds = {part["name"]: part["seconds"]["median"] for part in table["parts"]}
    assert 0 < seconds["matrix products"] < table["step_seconds"]["median"]
    assert (tmp_path / "late/profile/trace-9-12.json").is_file()


@pytest.mark.parametrize("value", ["10", "7:4", "4:4", "a:b"])
def test_a_wrong_range_is_refused(value: str):
    with pytest.raises(ConfigError, match="write 100:110"):
        tiny_run("data.path=x", f"log.profile={value}")
