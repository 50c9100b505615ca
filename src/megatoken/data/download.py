"""One small file from the internet, kept for ever.

In: an address, a place and the sha256 of what must arrive. Out: the file, whole and checked, or a Fault that
says how to do without the internet. Deliberately absent: mirrors, retries, resuming (these files are ~1 MB).
"""

import hashlib
import urllib.request
from pathlib import Path

from megatoken.errors import Exit, Fault

TIMEOUT_SECONDS = 10


def download(url: str, target: Path, sha256: str) -> bytes:
    """The bytes at `url`, from `target` when it already holds them; otherwise fetched once and kept there.

    Fault(Exit.DATA) when the address cannot be reached or holds something else.
    """
    kept = read_if_right(target, sha256)
    if kept is not None:
        return kept
    by_hand = f"download it elsewhere and place it at {target}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            data: bytes = answer.read()
    except OSError as error:  # URLError and time-outs are OSErrors
        raise Fault(Exit.DATA, f"cannot download: {error}", url, by_hand) from error
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise Fault(Exit.DATA, f"download has sha256 {found}, expected {sha256}", url, by_hand)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".tmp")
        partial.write_bytes(data)
        partial.replace(target)
    except OSError:
        pass  # a cache that cannot be written costs the next run a download, nothing else
    return data


def read_if_right(path: Path, sha256: str) -> bytes | None:
    """The bytes of `path` when it exists, can be read and has this sha256."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == sha256 else None
