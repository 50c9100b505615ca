"""Find settings of sinks that cannot work, and a wrong log.profile."""

import re

from megatoken.base.config.schema import Config
from megatoken.base.config.validate import Conflicts
from megatoken.base.redact import redact
from megatoken.base.rooms import list_entries
from megatoken.study.settings import ReportConfig


def check_log(config: Config) -> Conflicts:
    """Yield each wrong name, range or address as (setting, problem, how to fix it)."""
    log = config.section(ReportConfig)
    steps = re.fullmatch(r"(\d+):(\d+)", log.profile)
    if log.profile and (not steps or int(steps[1]) >= int(steps[2])):
        yield "log.profile", f"not a range of steps: {log.profile!r:.40}", "write 100:110"
    known = list_entries("sink")
    for name in log.list_sinks():
        if name not in known:
            yield "log.sinks", f"unknown sink {name!r}", f"choose from {', '.join(known)}"
    if redact(log.alert) != log.alert:
        fix = "export ALERT_WEBHOOK=ADDRESS, and log.alert='$ALERT_WEBHOOK'"
        yield "log.alert", "the address is a secret, which no run folder keeps", fix
