"""A stateless shuffle: a keyed permutation that is the same on every platform.

Each index is mapped by itself, without a table, so one integer is enough to record a position in
the data order.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of splitmix64
_ROUNDS = 8  # half rounds: each half of the index is updated four times


def make_key(seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch: splitmix64(splitmix64(seed) + epoch), modulo 2**64."""
    return _mix_integer(_mix_integer(seed) + epoch)


def feistel_permutation(index: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Map `index` (k,) through the permutation of [0, n) that `key` selects.

    This is a Feistel network over the smallest power of two >= n, with the finalizer of splitmix64
    (Steele, Lea and Flood, 2014) as its round function. Results >= n are mapped again until they
    are below n (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    assert n >= 1
    bits = max(2, (n - 1).bit_length())
    keys = [np.uint64(_mix_integer(key + round_)) for round_ in range(1, _ROUNDS + 1)]
    out = _scramble(index.astype(np.uint64), bits, keys)
    limit = np.uint64(n)
    outside = np.flatnonzero(out >= limit)
    while len(outside):
        again = _scramble(out[outside], bits, keys)
        out[outside] = again
        outside = outside[again >= limit]
    return out.astype(np.int64)


def _scramble(value: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """Apply the Feistel network to values of `bits` bits.

    It updates the two halves in turn instead of swapping them, because they can differ in length by
    one bit.
    """
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    for low_key, high_key in zip(keys[::2], keys[1::2], strict=True):
        low ^= _mix(high + low_key) & low_mask
        high ^= _mix(low + high_key) & high_mask
    high <<= low_bits
    high |= low
    return high


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 in place and return `value`."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value


def _mix_integer(value: int) -> int:
    """Return the output of splitmix64 for the state `value`."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
