"""Remove secrets from output, errors, logs, provenance and scripts."""

import json
import os
import re
from collections.abc import Iterable
from typing import Any, TextIO

MODEL_TEXT = ("text", "messages", "examples")  # keys whose values a model wrote
MIN_LENGTH = 6  # of a secret variable's value; shorter ones would match by chance
# Variables that hold a secret: HF_TOKEN, AWS_ACCESS_KEY_ID, WANDB_API_KEY, ...
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|PAT|AUTH|(API|ACCESS)?KEY|KEY_ID|SECRET|PASS|PASSWORD|PASSWD|PASSPHRASE|"
    r"CREDENTIALS?)$",
    re.IGNORECASE,
)
PASSWORD = re.compile(r"://[^\s/:@]*:(?!\d{1,5}/)([^\s@]+)@")
_OPTION = r"[\w-]*(?:token|secret|password|api[-_]?key)"
RULES = (
    # https://user:password@host, https://token@host, and with one slash as in a Path; but not
    # host:8080/a@b.
    (re.compile(r"""(\w\w:/{1,2})(?:[^\s/:@'"]*:(?!\d{1,5}/)[^\s@'"]+|[^\s/@'"]+)@"""), r"\1***@"),
    (
        re.compile(
            r"""([?&][\w-]*(?:token|key|sig|signature|secret|password|credential)=)[^&\s'"]+""",
            re.I,
        ),
        r"\1***",
    ),
    # --api-key x, and "--api-key", "x" in a list; but not prose after the option's name.
    (
        re.compile(
            rf"""(--{_OPTION}['"]?(?:[ =]\s*|,\s*(?=['"]))['"]?)(?!KEY\b|—)[^\s,'"]+""", re.I
        ),
        r"\1***",
    ),
    (re.compile(r"(\bbearer\s+)[\w.~+/-]{8,}", re.I), r"\1***"),
    (re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AIza)[\w-]{16,}"), "***"),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "***"),
)


def redact(text: str) -> str:
    """Replace secrets: values of secret variables, passwords in URLs, keys of a known form."""
    secrets = set[str]()
    for name, value in os.environ.items():
        secrets.update(PASSWORD.findall(value))
        if SECRET_NAME.search(name):
            secrets.add(value)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_LENGTH:
            text = text.replace(secret, "***").replace(json.dumps(secret)[1:-1], "***")
    for rule, replacement in RULES:
        text = rule.sub(replacement, text)
    return text


def redact_values(value: Any) -> Any:
    """Redact the strings in a JSON value, except under the keys MODEL_TEXT."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            redact_values(key): item if key in MODEL_TEXT else redact_values(item)
            for key, item in value.items()
        }
    return [redact_values(item) for item in value] if isinstance(value, list | tuple) else value


class RedactedStream:
    """A text stream, such as stderr, whose writes are redacted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(redact(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
