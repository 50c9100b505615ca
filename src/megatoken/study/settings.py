"""The settings of what a run draws and where it sends its rows (settings.toml)."""

from dataclasses import dataclass

SINKS = ("tensorboard", "wandb", "trackio")  # values of log.sinks, named like their packages


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The pictures that a run draws at its end, and the programs that get its rows."""

    plots: bool = True
    pictures: bool = False
    sinks: str = ""
    profile: str = ""


def split_sinks(names: str) -> list[str]:
    """Split the comma-separated names in log.sinks."""
    return [name.strip() for name in names.split(",") if name.strip()]
