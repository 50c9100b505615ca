"""Options and results of the soaks."""

import argparse
import json


def parse_options(doc: str | None, **defaults: int | float | str) -> argparse.Namespace:
    """Parse one option per keyword, named and typed as the keyword and its default."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def report(soak: str, is_good: object, **answer: object) -> int:
    """Print the JSON line of a soak and return its exit code."""
    print(json.dumps({"soak": soak, **answer}), flush=True)
    return int(not is_good)
