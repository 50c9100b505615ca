"""Compare the planner's speeds with published ones, and records/published-runs.md with both."""

from megatoken.plan.estimate import FASTEST, SLOWEST
from tests.plan.published import PAGE, ROWS, draw_page, median_error

TEST_ONLY = [each for each in ROWS if not each.sets]


def test_half_of_the_rows_are_within_15_percent():
    assert len(TEST_ONLY) >= 40
    assert median_error(ROWS) < 0.08
    assert median_error(TEST_ONLY) < 0.08
    for name in {each.source for each in ROWS} - {"Composer"}:
        assert median_error([each for each in ROWS if each.source == name]) < 0.19, name


def test_no_row_is_beyond_40_percent():
    assert [each for each in ROWS if abs(each.error) > 0.4] == []
    assert [each.what for each in ROWS if abs(each.error) > 0.3 and not each.reason] == []


def test_the_range_holds_four_in_five():
    within = [SLOWEST <= 1 / (1 + each.error) <= FASTEST for each in TEST_ONLY]
    assert sum(within) >= 0.8 * len(within)


def test_the_page_has_the_computed_table():
    assert PAGE.read_text() == draw_page(), "run `python -m tests.plan.published`"
