"""Post a message to a webhook when a run fails, stalls, spikes, is preempted or ends."""

import json
import os
import time
from collections import defaultdict
from http.client import HTTPException
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from megatoken.base.console import format_duration
from megatoken.base.errors import ConfigError, StorageError
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.metrics_log import STATUS, Row
from megatoken.study.sinks import Sink, SinkRun

EVENTS = ("spike", "rewind", "save failed")  # rows of the log that are alerts
ENDS = {"done": "ended", "stopped": "preempted", "failed": "failed", "dead": "failed"}
REPEAT_SECONDS = 600.0  # between two alerts of the same event
TIMEOUT_SECONDS = 10.0
PAUSES = (0.0, 2.0, 5.0)  # seconds before each attempt
MIN_STALL_SECONDS = 60.0
STALL_FACTOR = 10.0  # silence that is a stall, in multiples of the longest before
UNTIMED_SECONDS = 3600.0  # silence that is a stall in a phase that was not timed before


class Alerts(Sink):
    """Posts to log.alert. A failure to deliver one does not prevent the next."""

    def __init__(self, run: SinkRun) -> None:
        super().__init__(run)
        self._address = read_address(run.log.alert)
        self._silence = Silence()
        self._posted: dict[str, float] = {}  # the time of the last alert by event
        self._error = ""  # why the last one was not delivered

    def log(self, row: Row) -> None:
        if row["kind"] == "end":
            self._post(ENDS[row["state"]], row["step"], row["message"])
        elif row.get("what") in EVENTS:
            self._post(row["what"], row["step"], row["message"])

    def flush(self) -> None:
        status = read_object(self.run.folder / STATUS)
        if seconds := self._silence.find_stall(status, time.monotonic()):
            message = f"nothing for {format_duration(seconds)} in phase '{status['phase']}'"
            self._post("stalled", status["step"], message)

    def close(self) -> None:
        if self._error:
            raise StorageError("an alert was not delivered", self._error, "check log.alert")

    def _post(self, event: str, step: int, message: str) -> None:
        now = time.monotonic()
        if now - self._posted.get(event, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return
        self._posted[event] = now
        message = redact(message)
        text = f"megatoken: {self.run.name} {event} at step {step:,}" + f": {message}" * bool(
            message
        )
        content: Row = {"text": text}
        if urlsplit(self._address).hostname != "hooks.slack.com":
            content |= {"event": event, "run": self.run.name, "step": step, "message": message}
        self._error = post(self._address, content)
        print(f"{text} — {self._error or 'delivered'}", flush=True)


class Silence:
    """Times how long a run's status stays the same, by phase."""

    def __init__(self) -> None:
        self._status: Row = {}
        self._since = 0.0
        self._longest = defaultdict[str, float](float)

    def find_stall(self, status: Row, now: float) -> float:
        """Return for how long a running run has stalled; 0.0 if it has not."""
        phase = self._status.get("phase", "")
        seconds = now - self._since
        if status != self._status:
            if self._status:
                self._longest[phase] = max(self._longest[phase], seconds)
            self._status, self._since = status, now
            return 0.0
        timed = STALL_FACTOR * self._longest[phase] or UNTIMED_SECONDS
        is_stalled = status.get("state") == "running" and seconds > max(MIN_STALL_SECONDS, timed)
        return seconds if is_stalled else 0.0


def read_address(text: str) -> str:
    """Return the address of a webhook, with the values of the environment variables in it."""
    address = os.path.expandvars(text)
    if not address.startswith(("http://", "https://")):
        fix = "give an address, or $NAME of an environment variable that holds one"
        raise ConfigError("log.alert: not an address of http or https", text, fix)
    return address


def post(address: str, content: Row) -> str:
    """Post a JSON object, in several attempts; return why it failed, "" if it did not."""
    data = json.dumps(content).encode()
    request = Request(address, data, {"Content-Type": "application/json"})
    reason = ""
    for pause in PAUSES:
        time.sleep(pause)
        try:
            with urlopen(request, timeout=TIMEOUT_SECONDS):
                return ""
        except OSError as error:
            reason = str(error)
        except HTTPException as error:  # its text may hold the address
            reason = type(error).__name__
    return reason
