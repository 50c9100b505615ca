"""Copies between host and GPU go through pinned memory, without a wait for each."""

from pathlib import Path

import torch

from megatoken.base.config.schema import MachineConfig
from megatoken.data.dataloader import DataLoader, Prefetcher
from megatoken.data.dataset import load_dataset
from megatoken.store.save import copy_tensors
from megatoken.study.bench.workload import build_workload
from tests.nullgpu import counters
from tests.nullgpu.models import shrink
from tests.tiny_run import write_shards


def test_separated_documents_are_copied_without_a_wait(tmp_path: Path):
    dataset = load_dataset(
        write_shards(tmp_path).removeprefix("data.path="), external_tokenizer="bytes"
    )
    loader = DataLoader(dataset.train, seq_len=16, batch_size=8, seed=1, document_start=32)
    prefetcher = Prefetcher(loader, torch.device("cuda", 0))
    prefetcher.get(0)
    counters.reset()
    assert prefetcher.get(1).starts_BT is not None
    counts = counters.read()
    prefetcher.close()
    assert counts.find("[copy: H2D pinned") == 2  # inputs and targets
    assert counts.syncs == 0


def test_a_save_waits_once_and_reuses_its_pinned_memory():
    machine = MachineConfig(device="cuda", compile="off")
    state = build_workload(shrink("gpt2-124m", 2), machine, batch_seqs=1, micro_batch=1).state
    copy_tensors(state)
    counters.reset()
    copy_tensors(state)
    counts = counters.read()
    n_tensors = 4 * len(state.sharded.local_params)  # weight, two moments and step
    assert counts.find("[copy: D2H pinned") == n_tensors
    assert counts.find("pageable", "[cudaHostAlloc]") == 0
    assert counts.syncs == 1
