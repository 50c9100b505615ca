"""Tables of tests, written as text."""


def read_table(text: str) -> dict[str, str]:
    """Return the rest of each line by its first word."""
    return dict(line.split(maxsplit=1) for line in text.strip().splitlines())
