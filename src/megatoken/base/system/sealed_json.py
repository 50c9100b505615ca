"""Seal and check JSON objects: their last key, `xxh3`, holds the hash of all bytes before it.

Dataset manifests use 64 bits, and checkpoint manifests 128. xxh3 detects accidental damage, but not
deliberate changes.
"""

import json
import re
from typing import Any

import xxhash

_SEAL = re.compile(rb',\n ?"xxh3": "([0-9a-f]{16}|[0-9a-f]{32})"\n}\n')
_LONGEST_SEAL = 64


def seal(body: bytes, *, bits: int, indent: str = "") -> bytes:
    """Append a hash of 64 or 128 bits and the closing brace to a JSON object.

    body: the object as bytes, without its last `\\n}`.
    """
    digest = _hash(body, bits)
    return body + f',\n{indent}"xxh3": "{digest}"\n}}\n'.encode("ascii")


def parse_sealed(content: bytes) -> Any:
    """Parse a sealed object, including its key `xxh3`. Raises ValueError if the hash is wrong."""
    start = max(0, content.rfind(b",\n", -_LONGEST_SEAL))
    ending = _SEAL.fullmatch(content, start)
    if ending is None:
        raise ValueError("no hash at its end")
    expected = ending[1].decode("ascii")
    actual = _hash(content[:start], 4 * len(expected))
    if actual != expected:
        raise ValueError(f"hash {actual}, expected {expected}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _hash(body: bytes, bits: int) -> str:
    hexdigest = {64: xxhash.xxh3_64_hexdigest, 128: xxhash.xxh3_128_hexdigest}[bits]
    return str(hexdigest(body))
