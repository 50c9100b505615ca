"""Each row of docs/faults.md has a test that is marked with its number; `make faults` runs them."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
FAULTS = TESTS.parent / "docs/faults.md"


def marked_faults() -> set[int]:
    """Return the numbers in `@pytest.mark.fault(...)` of all test files."""
    numbers = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                numbers |= {ast.literal_eval(argument) for argument in node.args}
    return numbers


def test_every_fault_has_a_test():
    rows = [int(number) for number in re.findall(r"^(\d+)\. ", FAULTS.read_text(), re.MULTILINE)]
    assert rows == list(range(1, 57))
    assert marked_faults() == set(rows)
