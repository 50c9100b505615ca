"""Tables of tests, written as text."""


def read_table(text: str) -> dict[str, str]:
    """Return the value in each line, by the word at its beginning."""
    return dict(line.split(maxsplit=1) for line in text.strip().splitlines())
