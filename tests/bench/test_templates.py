"""The chat templates that trl ships, if it is installed."""

import pytest

from benchmarks.templates import check, find_templates

PATHS = find_templates([])


@pytest.mark.skipif(not PATHS, reason="trl is not installed")
def test_no_template_of_trl_trains_a_wrong_word():
    pytest.importorskip("transformers")
    verdicts = dict(check(PATHS))
    wrong = {
        (name, verdict)
        for name, each in verdicts.items()
        for verdict in (each.values() if isinstance(each, dict) else ())
        if verdict.startswith("wrong")
    }
    assert not wrong
    assert sum(isinstance(each, dict) for each in verdicts.values()) > 30
