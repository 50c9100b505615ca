"""bench generate: both programs write the same ids from the same weights; ours alone where transformers is not."""

import argparse
import sys
from typing import Any

import pytest

from megatoken.bench import generate as bench
from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.console import Console
from megatoken.errors import ExitCode
from megatoken.model.gpt import GPT
from megatoken.native.library import find_library
from tests.tiny_model import TINY_GPT

OURS = ["megatoken", *(["megatoken int8"] if find_library() else [])]


@pytest.fixture(autouse=True)
def tiny_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "tiny", TINY_GPT)
    monkeypatch.setenv("MEGATOKEN_PRECISION", "fp32")


def run_tiny(tokens: int, prompt_tokens: int, repeats: int) -> dict[str, Any]:
    sizes = {"tokens": tokens, "prompt_tokens": prompt_tokens, "repeats": repeats}
    return bench.run(argparse.Namespace(preset="tiny", device="cpu", **sizes), Console())


def test_the_same_ids_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    answer = run_tiny(9, 4, 3)
    rates = answer["tokens_per_second"]
    assert list(rates) == [*OURS, "transformers fp32"]
    assert all(
        rate["repeats"] == 3 and 0 < rate["low"] <= rate["median"] <= rate["high"]
        for rate in rates.values()
    )
    assert answer["ratio"] == rates["megatoken"]["median"] / rates["transformers fp32"]["median"]
    assert (answer["new_tokens"], answer["prompt_tokens"], answer["same_ids"]) == (9, 4, True)
    assert "transformers" in capsys.readouterr().out.splitlines()[-1]


def test_transformers_writes_as_many_ids_as_asked_for() -> None:
    pytest.importorskip("transformers")
    model, reference = bench.build_models(TINY_GPT, Console())
    assert model.config == TINY_GPT
    ids = bench.generate_with(reference, [1, 2, 3], 13)
    assert len(ids) == 13
    assert max(ids) < TINY_GPT.vocab_size
    assert len(set(ids)) >= 3, "a text of one token compares nothing"


def test_other_ids_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    build = bench.build_models

    def build_different(model_config: ModelConfig, console: Console) -> tuple[GPT, Any]:
        return GPT(model_config, seed=5), build(model_config, console)[1]

    monkeypatch.setattr(bench, "build_models", build_different)
    assert run_tiny(9, 4, 1)["same_ids"] is False
    assert "warning: the programs gave different ids" in capsys.readouterr().out


def test_ours_alone_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        sys.modules, "transformers", None
    )  # what an import of something absent meets
    answer = run_tiny(5, 2, 2)
    assert list(answer["tokens_per_second"]) == OURS
    assert (answer["ratio"], answer["same_ids"]) == (None, True)
    assert capsys.readouterr().out.count("transformers is not installed") == 1


def test_in_bf16_the_faster_precision_of_transformers_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("MEGATOKEN_PRECISION", "bf16")
    answer = run_tiny(5, 2, 2)
    rates = {name: rate["median"] for name, rate in answer["tokens_per_second"].items()}
    assert list(rates) == [*OURS, "transformers fp32", "transformers bf16"]
    assert answer["ratio"] == rates["megatoken"] / max(
        rates["transformers fp32"], rates["transformers bf16"]
    )
    assert (answer["precision"], answer["same_ids"]) == ("bf16", None)


def test_a_text_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--tokens", "1009"]) == ExitCode.CONFIG
    message = "prompt of 16 and 1009 new tokens need 1025 — --tokens — the context of gpt2-124m is 1024: ask for fewer"
    assert capsys.readouterr().err == f"error: {message}\n"
