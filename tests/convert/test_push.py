"""export --push: the real client of the Hugging Face hub uploads to a local double of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.convert.hub import TOKEN, serve_hub
from tests.tiny_run import read_rows, train, write_shards

LOAD = """
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("me/tiny")
print(sum(p.numel() for p in model.parameters()))
"""


@pytest.mark.long
def test_a_pushed_run_is_loaded_from_the_hub_with_its_card(tmp_path: Path):
    pytest.importorskip("transformers")
    data = write_shards(tmp_path / "data")
    run = tmp_path / "run"
    train(run, data)
    with serve_hub() as (address, files):
        variables = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}
        variables |= {"HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "wrong"}

        def start(*command: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, *command], env=variables, capture_output=True, text=True
            )

        def push(out: str) -> subprocess.CompletedProcess[str]:
            out = str(tmp_path / out)
            return start("-m", "megatoken", "export", str(run), "--out", out, "--push", "me/tiny")

        refused = push("refused")
        assert (refused.returncode, refused.stderr.count("\n")) == (5, 1)
        assert "cannot push" in refused.stderr
        assert not files
        variables["HF_TOKEN"] = TOKEN
        done = push("out")
        assert f"pushed to {address}/me/tiny" in done.stdout, done.stderr
        assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
        loaded = start("-c", LOAD)
        parameters = (257 + 16) * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
        assert loaded.stdout.split()[-1:] == [str(parameters)], loaded.stderr
    _, header, text = files["README.md"].decode().split("---\n")
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert f"held-out loss {read_rows(run, 'val')[-1]['loss']:.4f}, " in text
    assert "\nmodel.n_layer=2\n" in text
    for absent in ("optim.beta1", "data.path=", "machine.", str(tmp_path)):
        assert absent not in text
