"""Figures in README and docs are those of their records."""

import pytest

from benchmarks.figures import PAGES, ROOT, fill_page, list_unlisted
from benchmarks.pages import list_records, list_replays


@pytest.mark.parametrize("name", PAGES)
def test_page_has_the_figures_of_its_records(name: str):
    page = (ROOT / name).read_text()
    assert page == fill_page(name, page)
    assert list_unlisted(name, page) == []


def test_tables_of_records_are_up_to_date():
    assert (ROOT / "docs/reproduce.md").read_text().endswith(list_replays())
    assert (ROOT / "records/README.md").read_text() == list_records()
