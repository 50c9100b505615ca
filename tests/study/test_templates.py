"""The chat templates that trl ships, if it is installed."""

import pytest

from benchmarks.templates import check, find_templates

PATHS = find_templates([])


@pytest.mark.skipif(not PATHS, reason="trl is not installed")
def test_no_template_of_trl_trains_a_wrong_word():
    pytest.importorskip("transformers")
    verdicts = {name: each for name, each in check(PATHS) if isinstance(each, dict)}
    assert len(verdicts) > 30
    for name, each in verdicts.items():
        assert not any(verdict.startswith("wrong") for verdict in each.values()), (name, each)
