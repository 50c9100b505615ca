"""bench generate: both contenders write the same ids from the same weights; ours alone where transformers is not."""

import sys
from typing import Any

import pytest

from megatoken.bench import generate as bench
from megatoken.cli import main
from megatoken.console import Console
from megatoken.errors import Exit
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from tests.tiny import CPU, SHAPE


def test_the_same_ids_beside_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    answer = bench.measure(SHAPE, CPU, 9, 4, 3, Console())
    rates = answer["tokens_per_second"]
    assert list(rates) == ["megatoken", "transformers"]
    assert all(rate["repeats"] == 3 and 0 < rate["low"] <= rate["median"] <= rate["high"] for rate in rates.values())
    assert answer["ratio"] == rates["megatoken"]["median"] / rates["transformers"]["median"]
    assert (answer["new_tokens"], answer["prompt_tokens"], answer["same_ids"]) == (9, 4, True)
    assert "transformers" in capsys.readouterr().out.splitlines()[-1]


def test_the_reference_writes_as_many_ids_as_asked_for() -> None:
    pytest.importorskip("transformers")
    model, reference = bench.build_models(SHAPE, Console())
    assert model.shape == SHAPE
    ids = bench.follow_reference(reference, [1, 2, 3], 13)()
    assert len(ids) == 13
    assert max(ids) < SHAPE.vocab_size
    assert len(set(ids)) >= 3, "a text of one token compares nothing"


def test_other_ids_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    build = bench.build_models

    def build_different(shape: Shape, console: Console) -> tuple[GPT, Any]:
        model, reference = build(shape, console)
        initialize(model, 5)
        return model, reference

    monkeypatch.setattr(bench, "build_models", build_different)
    assert bench.measure(SHAPE, CPU, 9, 4, 1, Console())["same_ids"] is False
    assert "warning: the contenders gave different ids" in capsys.readouterr().out


def test_ours_alone_without_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # what an import of something absent meets
    answer = bench.measure(SHAPE, CPU, 5, 2, 2, Console())
    assert list(answer["tokens_per_second"]) == ["megatoken"]
    assert (answer["ratio"], answer["same_ids"]) == (None, True)
    assert capsys.readouterr().out.count("transformers is not installed") == 1


def test_a_text_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "generate", "--tokens", "1009"]) == Exit.CONFIG
    said = "prompt of 16 and 1009 new tokens need 1025 — --tokens — the context of gpt2-124m is 1024: ask for fewer"
    assert capsys.readouterr().err == f"error: {said}\n"
