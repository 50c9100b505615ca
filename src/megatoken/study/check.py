"""Find unknown names in log.sinks, and a wrong log.profile."""

import re

from megatoken.base.config.schema import Config
from megatoken.base.config.validate import Conflicts
from megatoken.study.settings import SINKS, ReportConfig, split_sinks


def check_names(config: Config) -> Conflicts:
    """Yield each wrong name or range as (setting, problem, how to fix it)."""
    profile = config.section(ReportConfig).profile
    steps = re.fullmatch(r"(\d+):(\d+)", profile)
    if profile and (not steps or int(steps[1]) >= int(steps[2])):
        yield "log.profile", f"not a range of steps: {profile!r:.40}", "write 100:110"
    for name in split_sinks(config.section(ReportConfig).sinks):
        if name not in SINKS:
            yield "log.sinks", f"unknown sink {name!r}", f"choose from {', '.join(SINKS)}"
