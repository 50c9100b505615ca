"""The number of threads that computations on the CPU use."""

import torch

_count = 0


def set_thread_count(count: int) -> None:
    """Set the number of threads of torch and of the native kernels."""
    global _count
    _count = count
    torch.set_num_threads(count)


def thread_count() -> int:
    """Return the number set last, even while torch uses one thread, as with native kernels."""
    return _count or torch.get_num_threads()


def use_torch_threads(count: int) -> None:
    """Set the number of torch's threads alone; 0 leaves it as it is.

    With 1, idle threads of torch take no cores from the native kernels.
    """
    if count:
        torch.set_num_threads(count)
