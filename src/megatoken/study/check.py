"""Find unknown names in log.sinks."""

from megatoken.base.config.schema import Config
from megatoken.base.config.validate import Conflicts
from megatoken.study.settings import SINKS, ReportConfig, split_sinks


def check_names(config: Config) -> Conflicts:
    """Yield each unknown sink as (setting, problem, how to fix it)."""
    for name in split_sinks(config.section(ReportConfig).sinks):
        if name not in SINKS:
            yield "log.sinks", f"unknown sink {name!r}", f"choose from {', '.join(SINKS)}"
