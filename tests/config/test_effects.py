"""Settings that would have no effect are refused, where their user gave them."""

from pathlib import Path

import pytest

from megatoken.cli.main import main
from megatoken.config.effects import MANIFEST, RULES
from megatoken.config.load import list_recipes, render, resolve
from megatoken.config.schema import FIELDS
from megatoken.data.shard_format import MANIFEST_NAME
from megatoken.errors import ConfigError

OLD_RUN = Path(__file__).parents[1] / "old_run" / "run" / "config.yaml"
# Whoever adds a setting decides: a row of RULES, or a name here.
ALWAYS_HAVE_AN_EFFECT = {
    *(
        "seed",
        "model.preset",
        "model.n_layer",
        "model.n_head",
        "model.n_kv_head",
        "model.d_model",
        "model.d_ff",
    ),
    *(
        "model.vocab_size",
        "model.seq_len",
        "model.norm",
        "model.norm_eps",
        "model.pos_emb",
        "model.mlp",
        "model.bias",
    ),
    *("model.qk_norm", "model.embedding_norm", "model.residual_scales", "model.value_embeddings"),
    *("model.logit_softcap", "model.zero_init", "model.value_head"),
    *("model.tie_embeddings", "model.dropout", "model.init", "data.path", "optim.name", "optim.lr"),
    *("optim.schedule", "objective.name"),
    *(
        "optim.warmup",
        "optim.beta1",
        "optim.beta2",
        "optim.eps",
        "optim.weight_decay",
        "optim.grad_clip",
    ),
    *(
        "optim.spike",
        "optim.max_skips",
        "budget.steps",
        "budget.tokens",
        "budget.epochs",
        "budget.batch_tokens",
    ),
    *(
        "budget.batch_start",
        "budget.batch_ramp",
        "machine.device",
        "machine.precision",
        "machine.attention",
        "machine.micro_batch",
    ),
    *(
        "machine.loss_chunk",
        "machine.gemm_backend",
        "machine.activation_checkpointing",
        "machine.sharding",
    ),
    *(
        "machine.tensor_parallel",
        "machine.threads",
        "machine.deterministic",
        "save.every",
        "save.keep_last",
    ),
    *("data.order", "save.mirror", "log.sinks"),
    *(
        "save.time_limit",
        "evaluate.tokens",
        "evaluate.tasks",
        "sample.every",
        "log.every",
        "log.plots",
    ),
}


def test_every_setting_has_a_rule_or_always_an_effect() -> None:
    ruled = {key for rule in RULES for key in rule.keys.split()}
    assert ruled | ALWAYS_HAVE_AN_EFFECT == FIELDS.keys()
    assert not ruled & ALWAYS_HAVE_AN_EFFECT
    assert {rule.cause for rule in RULES} <= FIELDS.keys()
    assert MANIFEST == MANIFEST_NAME


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("model.pos_emb=learned model.rope_theta=1000", "model.pos_emb=learned"),
        ("model.pos_emb=learned model.rope_factor=8", "model.pos_emb=learned"),
        ("model.pos_emb=rotary model.rope_low=2", "model.rope_factor=1.0"),
        ("model.pos_emb=rotary model.rope_high=2", "model.rope_factor=1.0"),
        ("model.pos_emb=rotary model.rope_context=2", "model.rope_factor=1.0"),
        ("model.window=0 model.window_pattern=SL", "model.window=0"),
        ("optim.schedule=constant optim.decay=0.5dur", "optim.schedule=constant"),
        ("optim.schedule=constant optim.min_lr_ratio=0.2", "optim.schedule=constant"),
        ("objective.name=sft data.document_mask=true", "objective.name=sft"),
        ("optim.name=adamw optim.matrix_lr=0.03", "optim.name=adamw"),
        ("optim.name=adamw optim.momentum=0.9", "optim.name=adamw"),
        ("optim.name=adamw optim.momentum_warmup=300steps", "optim.name=adamw"),
        ("optim.name=adamw optim.cautious_decay=true", "optim.name=adamw"),
        ("machine.device=cpu machine.tf32=true", "machine.device=cpu"),
        ("machine.device=mps machine.fused=on", "machine.device=mps"),
        ("machine.device=mps machine.compile=graphs", "machine.device=mps"),
        ("machine.precision=fp32 machine.master_weights=on", "machine.precision=fp32"),
        ("save.every=0 save.keep_every=100", "save.every=0steps"),
        ("evaluate.tokens=0 evaluate.every=100", "evaluate.tokens=0"),
        ("evaluate.tokens=0 save.keep_best=true", "evaluate.tokens=0"),
        ("evaluate.tokens=0 evaluate.patience=3", "evaluate.tokens=0"),
        ("model.seq_len=256 model.window=256", "model.seq_len=256"),
        ("evaluate.tasks_every=100", 'evaluate.tasks=""'),
        ("evaluate.tasks_data=x", 'evaluate.tasks=""'),
        ("evaluate.tasks_limit=100", 'evaluate.tasks=""'),
        ("sample.every=0 sample.at_start=true", "sample.every=0steps"),
        ("sample.every=0 sample.prompt=x", "sample.every=0steps"),
        ("sample.every=0 sample.tokens=9", "sample.every=0steps"),
        ("sample.every=0 sample.temperature=1", "sample.every=0steps"),
        ("sample.every=0 sample.num_samples=2", "sample.every=0steps"),
        ("sample.temperature=0 sample.top_k=9", "sample.temperature=0.0"),
        ("log.plots=false log.pictures=true", "log.plots=false"),
    ],
)
def test_a_word_without_effect_is_refused(words: str, cause: str) -> None:
    *causes, vain = words.split()
    resolve("quickstart", causes)
    key, name = vain.partition("=")[0], cause.partition("=")[0]
    with pytest.raises(ConfigError) as error:
        resolve("quickstart", [*causes, vain])
    assert str(error.value).startswith(f"{key} has no effect beside {cause}: ")
    assert str(error.value).endswith(f" — command line — leave it out, or change {name}")


def test_the_tokenizer_of_a_prepared_dataset_is_its_own(tmp_path: Path) -> None:
    words = [f"data.path={tmp_path}", "data.tokenizer=bytes"]
    assert resolve("quickstart", words).config.data.tokenizer == "bytes"
    (tmp_path / MANIFEST_NAME).touch()
    with pytest.raises(
        ConfigError, match=r"data.tokenizer has no effect beside data.path=.* carries its own"
    ):
        resolve("quickstart", words)


def test_adamw_settings_are_for_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatoken.config.fields._REGISTERED", {"optim.name": ["mine"]})
    with pytest.raises(ConfigError, match=r"machine.adamw has no effect beside optim.name=mine"):
        resolve("quickstart", ["optim.name=mine", "machine.adamw=loop"])


@pytest.mark.parametrize(
    "off", ["save.keep_every=0", "evaluate.tasks_limit=0", "sample.prompt=", "machine.fused=off"]
)
def test_asking_for_nothing_is_no_mistake(off: str) -> None:
    resolved = resolve("quickstart", ["save.every=0", "sample.every=0", "machine.device=cpu", off])
    assert resolved.origins[off.partition("=")[0]] == "command line"


def test_our_own_loss_kernel_is_for_cpus_too() -> None:
    assert (
        resolve("quickstart", ["machine.device=cpu", "machine.fused=on"]).config.machine.fused
        == "on"
    )


SMALL = "model: {n_head: 4, d_model: 64}\nbudget: {steps: 1, batch_tokens: 1024}\n"


def test_a_recipe_of_ones_own_is_held_to_it_and_may_be_switched_off_later(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(SMALL + "sample:\n  every: 10\n  prompt: once\nlog: {plots: false}\n")
    resolve(str(recipe))
    resolve(str(recipe), ["sample.every=0"])  # says nothing about the recipe's prompt
    recipe.write_text(SMALL + "sample:\n  every: 0\n  prompt: once\n")
    with pytest.raises(
        ConfigError,
        match=r"sample.prompt has no effect beside sample.every=0steps: .*mine.yaml:5 — ",
    ):
        resolve(str(recipe))
    resolve(str(recipe), ["sample.every=5"])


@pytest.mark.parametrize("recipe", list_recipes())
def test_what_ships_may_be_switched_off(recipe: str) -> None:
    words = [
        "sample.every=0",
        "save.every=0",
        "evaluate.tokens=0",
        "evaluate.tasks=",
        "optim.schedule=constant",
    ]
    config = resolve(
        recipe, [*words, "log.plots=false", "machine.device=cpu", "model.dropout=0.1"]
    ).config
    assert (config.sample.every.value, config.save.every.value, config.evaluate.tokens) == (0, 0, 0)


def test_what_config_and_a_run_folder_write_is_read(tmp_path: Path) -> None:
    written = resolve("quickstart", ["sample.every=0", "optim.schedule=constant"])
    (tmp_path / "config.yaml").write_text(render(written.config, written.origins))
    assert resolve(str(tmp_path / "config.yaml")).config == written.config
    resolve(str(OLD_RUN))
    with pytest.raises(ConfigError, match=r"sample.top_k has no effect"):
        resolve(str(tmp_path / "config.yaml"), ["sample.top_k=9"])


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("evaluate.tasks=foo", "unknown task 'foo'"),
        ("evaluate.tasks=piqa,hella?", "unknown task 'hella'"),
        ("data.tokenizer=/nope", "no tokenizer or file called '/nope'"),
        ("data.tokenizer=bpe:400", "bpe:400 must be trained"),
        ("machine.tensor_parallel=3", "3 does not divide the n_head of 4"),
        ("machine.tensor_parallel=128", "128 does not divide the n_head of 4"),
    ],
)
@pytest.mark.parametrize("command", [["config"], ["train"], ["launch", "slurm"]])
def test_config_refuses_what_train_refuses(
    command: list[str],
    word: str,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # where no quickstart has left its data
    assert main([*command, "quickstart", word]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_config_reads_tasks_that_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "quickstart", "evaluate.tasks=hellaswag?,piqa"]) == 0
    assert 'tasks: "hellaswag?,piqa"' in capsys.readouterr().out
