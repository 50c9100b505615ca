"""The number of threads that computations on the CPU use."""

import torch

_count = 0


def set_thread_count(count: int) -> None:
    """Set the number of threads of torch and of the native kernels."""
    global _count
    _count = count
    torch.set_num_threads(count)


def thread_count() -> int:
    """Return the number last set, even if torch has left its threads to the native kernels."""
    return _count or torch.get_num_threads()


def leave_threads_to_kernels(leave: bool = True) -> None:
    """Let torch use one thread, so that its waiting threads do not keep cores from the kernels.

    With False, torch gets its threads back.
    """
    torch.set_num_threads(1 if leave else thread_count())
