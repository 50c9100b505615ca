"""Command-line options of the soaks."""

import argparse


def parse_options(doc: str | None, **defaults: int | float | str) -> argparse.Namespace:
    """Parse one option per keyword, named and typed as the keyword and its default."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=formatter)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=f"default {default}")
    return parser.parse_args()
