"""export --push: the real client of the Hugging Face hub uploads to a local double of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.convert.hub import TOKEN, serve_hub
from tests.tiny_run import read_rows, train, write_shards

USE = """
import os, sys
from megatoken.cli.main import main

def push(token, out):
    os.environ["HF_TOKEN"] = token
    return main(["export", sys.argv[1], "--out", out, "--push", "me/tiny"])

assert push("wrong", "refused") == 5
assert push(sys.argv[2], "out") == 0
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
        variables = {"HF_ENDPOINT": address, "HF_HOME": f"{tmp_path}/hf"}
        done = subprocess.run(
            [sys.executable, "-c", USE, run, TOKEN],
            env=os.environ | variables | {"HF_HUB_DISABLE_XET": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "cannot push" in done.stderr
    assert f"pushed to {address}/me/tiny" in done.stdout
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    parameters = (257 + 16) * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32
    assert done.stdout.split()[-1] == str(parameters)
    _, header, text = files["README.md"].decode().split("---\n")
    assert yaml.safe_load(header)["library_name"] == "transformers"
    assert f"held-out loss {read_rows(run, 'val')[-1]['loss']:.4f}, " in text
    assert "\nmodel.n_layer=2\n" in text
    for absent in ("optim.beta1", "data.path=", "machine.", str(tmp_path)):
        assert absent not in text
