"""The settings of what a run draws and where it sends its rows (settings.toml)."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The pictures that a run draws at its end, and the programs that get its rows."""

    plots: bool = True
    pictures: bool = False
    sinks: str = ""
    profile: str = ""
    project: str = ""
    group: str = ""
    tags: str = ""
    alert: str = ""
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"

    def list_sinks(self) -> list[str]:
        """Return the names of all sinks that get the run's rows."""
        alert = ["alert"] if self.alert else []
        prometheus = ["prometheus"] if self.metrics_port else []
        return [*split_names(self.sinks), *alert, *prometheus]


def split_names(names: str) -> list[str]:
    """Split names separated by commas."""
    return [name.strip() for name in names.split(",") if name.strip()]
