"""What is this machine: caches, cores, memory. The only module that reads the environment."""

import os
from pathlib import Path


def huggingface_cache() -> Path:
    """Folder in which huggingface_hub keeps downloaded repositories (HF_HUB_CACHE, HF_HOME)."""
    if hub := os.environ.get("HF_HUB_CACHE"):
        return Path(hub)
    return Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"


def tiktoken_caches() -> list[Path]:
    """Folders in which tiktoken keeps vocabularies, in the order in which it looks."""
    named = [os.environ.get("TIKTOKEN_CACHE_DIR"), os.environ.get("DATA_GYM_CACHE_DIR")]
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / "data-gym-cache"
    return [Path(folder) for folder in named if folder] + [temporary]


def megatoken_cache() -> Path:
    """Folder for what megatoken downloads or measures once per machine (MEGATOKEN_CACHE)."""
    own = os.environ.get("MEGATOKEN_CACHE")
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(root) / "megatoken"


def cpu_count() -> int:
    """Processors this process may use (affinity and cgroup aware on Linux)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
