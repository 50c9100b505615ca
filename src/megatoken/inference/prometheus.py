"""Format values for Prometheus."""

from collections.abc import Mapping


def format_metrics(kind: str, values: Mapping[str, float]) -> str:
    """Format values in Prometheus' text format; `kind` is their type."""
    lines = []
    for name, value in sorted(values.items()):
        lines.append(f"# TYPE megatoken_{name.partition('{')[0]} {kind}\n")
        lines.append(f"megatoken_{name} {value}\n")
    return "".join(dict.fromkeys(lines))
