"""The tracker counts live storages and ring traffic, of real and of fake tensors."""

import torch

from megatoken.plan.memory_tracker import MemoryTracker


def test_storages_are_counted_once_until_they_are_freed():
    with MemoryTracker() as tracker:
        a = torch.zeros(1000)
        b = a.view(10, 100)[3:]
        assert tracker.live_bytes == 4000
        c = a + 1
        assert tracker.live_bytes == tracker.peak_bytes == 8000
        del a
        assert tracker.live_bytes == 8000  # b sees it
        del b
        assert (tracker.live_bytes, tracker.peak_bytes) == (4000, 8000)
        c.untyped_storage().resize_(0)
        assert tracker.live_bytes == 0
        c.untyped_storage().resize_(20_000)
        assert tracker.peak_bytes == 20_000
        c.untyped_storage().resize_(40)
        tracker.reset_peak()
        assert tracker.peak_bytes == 40


def test_gradients_at_the_peak_are_counted():
    with MemoryTracker() as tracker:
        tracker.count_gradients = lambda: 7
        torch.zeros(10)
    assert tracker.gradients_at_peak == 7
