"""Malformed recipes, overrides, options and variables, each with what its one line of error must say."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_origin

from megatoken.config.fields import ConfigField, Duration
from megatoken.config.schema import FIELDS

GOOD = "data: {path: nowhere}\nbudget: {steps: 1, batch_tokens: 1024}\nmodel: {preset: gpt2-124m}\n"
TAGS = "not valid YAML: tags, anchors and aliases are not read"


@dataclasses.dataclass(frozen=True, slots=True)
class BadConfig:
    """words: behind `megatoken train`; RECIPE stands for the path of a file that contains `recipe`. says: parts of the
    error, in which FILE stands for that path."""

    name: str
    says: tuple[str, ...]
    recipe: bytes = GOOD.encode()
    words: tuple[str, ...] = ("RECIPE",)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def arguments(self, path: str) -> list[str]:
        """`words` with the path of the recipe."""
        return [path if word == "RECIPE" else word for word in self.words]

    def find_mistakes(self, error: str, path: str) -> list[str]:
        """What is missing in the text on stderr, or should not be there."""
        missing = [part for part in self.says if part.replace("FILE", path) not in error]
        is_line = error.startswith("error: ") and error.count("\n") == 1 and error.count(" — ") >= 1
        return missing + ([] if is_line else ["one line of what — where — fix"])


def text(name: str, recipe: str, *says: str) -> BadConfig:
    return BadConfig(f"yaml: {name}", says, recipe.encode())


def override(word: str, *says: str) -> BadConfig:
    return BadConfig(f"override: {word[:60]}", says, words=("RECIPE", word))


def options(words: str, *says: str) -> BadConfig:
    return BadConfig(f"options: {words[:60]}", says, words=tuple(words.split()))


def misspelt_fields() -> Iterator[BadConfig]:
    """One letter of every field's name is missing: in the file and, every third, on the command line."""
    for number, key in enumerate(FIELDS):
        section, _, name = key.rpartition(".")
        at = len(name) // 2
        wrong = name[:at] + name[at + 1 :] if len(name) > 2 else name + name[-1]
        wrong_key = f"{section}.{wrong}" if section else wrong
        says = f"unknown key '{wrong_key}'", f"did you mean '{key}'?"
        if number % 3 == 0:
            yield override(f"{wrong_key}=1", "— command line —", *says)
        else:
            lines = f"{section}:\n  {wrong}: 1\n" if section else f"\n{wrong}: 1\n"
            yield text(f"misspelt {wrong_key}", lines, "FILE:2", *says)


def wrong_value(spec: ConfigField) -> list[str]:
    """Values that the field cannot have."""
    if spec.type is str:
        return []
    if get_origin(spec.type) is Literal:
        return ["nonsense"]
    if spec.type is bool:
        return ["maybe"]
    beyond = ["-7" if spec.low >= 0 else "", "1e300" if spec.high < 1e300 else ""]
    kind = {Duration: ["5 bananas", "nan"], int: ["1.5", "2e999"], float: ["nan", "inf", "fast"]}
    return [*kind.get(spec.type, ["some"]), *filter(None, beyond)]


def wrong_values() -> Iterator[BadConfig]:
    for number, (key, spec) in enumerate(FIELDS.items()):
        for value in wrong_value(spec):
            section, _, name = key.rpartition(".")
            says = f"{key}: ", "default "
            if number % 2:
                yield override(f"{key}={value}", "— command line —", *says)
            else:
                lines = f"{section}:\n  {name}: {value}\n" if section else f"\n{name}: {value}\n"
                yield text(f"{key}: {value}", lines, "FILE:2", *says)


def broken_yaml() -> Iterator[BadConfig]:
    yield text("empty", "", "no length given", "budget.steps")
    yield text("only a comment", "# nothing\n", "no length given")
    yield text("a list", "- a\n- b\n", "FILE:1", "neither a value nor a section")
    yield text("a word", "gpt2\n", "FILE:1", "neither a value nor a section")
    yield text("a number", "7\n", "FILE:1", "neither a value nor a section")
    yield text("tabs", "model:\n\tn_layer: 3\n", "not valid YAML", "FILE:2")
    yield text("indentation", "model:\n  n_layer: 3\n n_head: 2\n", "not valid YAML", "FILE:3")
    yield text("no colon", "model\n  n_layer: 3\n", "not valid YAML", "FILE:2")
    yield text("no blank", "model:\n  n_layer:3\n", "FILE:1", "model is a section, got 'n_layer:3'")
    yield text("open quote", "data:\n  path: 'x\n", "not valid YAML", "FILE:")
    yield text("open double quote", 'data:\n  path: "x\n', "not valid YAML", "FILE:")
    yield text("open brace", "model: {n_layer: 3\n", "not valid YAML", "FILE:")
    yield text("open bracket", "model: [n_layer\n", "not valid YAML", "FILE:")
    yield text("closing brace", "model: n_layer: 3}\n", "not valid YAML", "FILE:1")
    yield text("two colons", "model: n_layer: 3\n", "not valid YAML", "FILE:1")
    yield text("percent", "%model: 3\n", "not valid YAML", "FILE:1")
    yield text("at sign", "model: @3\n", "not valid YAML", "FILE:1")
    yield text("backtick", "model: `3`\n", "not valid YAML", "FILE:1")
    yield text("bad escape", 'data: {path: "\\q"}\n', "not valid YAML", "FILE:1")
    yield text("two documents", "seed: 1\n---\nseed: 2\n", "not valid YAML", "FILE:2")
    yield text("yaml version", "%YAML 9.9\n---\nseed: 1\n", "not valid YAML", "FILE:1")
    yield text(
        "duplicate field", "model:\n  n_layer: 2\n  n_layer: 3\n", "given twice", "FILE:3", "FILE:2"
    )
    yield text(
        "duplicate by section",
        "model: {n_layer: 2}\nmodel: {n_layer: 3}\n",
        "given twice",
        "FILE:2",
        "FILE:1",
    )
    yield text("anchor", "model: &m {n_layer: 2}\n", TAGS, "FILE:1")
    yield text("alias", "a: &x 1\nseed: *x\n", TAGS, "FILE:1")
    yield text("unknown alias", "seed: *nowhere\n", "not valid YAML", "FILE:1")
    yield text("merge", "model: &m {n_layer: 2}\noptim:\n  <<: *m\n", TAGS, "FILE:1")
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 20)
    )
    yield text("alias bomb", bomb, TAGS, "FILE:1")
    yield text(
        "python object", "seed: !!python/object/apply:os.system ['touch canary']\n", TAGS, "FILE:1"
    )
    yield text("python name", "seed: !!python/name:os.system\n", TAGS, "FILE:1")
    yield text("local tag", "seed: !secret 1\n", TAGS, "FILE:1")
    yield text("string tag", "seed: !!str 1\n", TAGS, "FILE:1")
    yield text("binary tag", "seed: !!binary aGVsbG8=\n", TAGS, "FILE:1")
    yield text("complex key", "? [1, 2]\n: 3\n", "FILE:1", "neither a value nor a section")
    yield text("section as key", "? {a: 1}\n: 3\n", "FILE:1", "neither a value nor a section")
    yield text(
        "list of fields",
        "model:\n  - n_layer: 3\n",
        "FILE:1",
        "model is neither a value nor a section",
    )
    yield text(
        "list of values", "model:\n  n_layer: [3, 4]\n", "FILE:2", "model.n_layer is neither"
    )
    yield text(
        "three levels",
        "model:\n  gpt:\n    n_layer: 3\n",
        "FILE:3",
        "unknown key 'model.gpt.n_layer'",
        "'model.n_layer'",
    )
    yield text(
        "a section below a field",
        "optim:\n  lr:\n    value: 3\n",
        "FILE:3",
        "unknown key 'optim.lr.value'",
        "'optim.lr'",
    )
    yield text("deep nesting", "model: " + "{a: " * 3000 + "1" + "}" * 3000, "FILE", "nested")
    yield text("deep list", "[" * 100_000, "FILE", "nested")
    yield text("deep blocks", "".join(" " * n + "a:\n" for n in range(1200)), "FILE", "nested")
    yield text("empty key", '"": 3\n', "FILE:1", "unknown key ''")
    yield text("long key", "x" * 1000 + ": 3\n", "FILE:1", "unknown key 'xxx")
    yield text("long value", "model:\n  n_layer: " + "9" * 5000 + "\n", "FILE:2", "model.n_layer: ")
    yield text("many digits", "model:\n  n_layer: " + "9" * 300 + "\n", "FILE:2", "model.n_layer: ")
    yield text("key of two lines", '"model\\nn_layer": 3\n', "FILE:1", "unknown key 'model")
    yield text(
        "multi-line text",
        "optim:\n  lr: |\n    1\n    2\n",
        "FILE:2",
        "optim.lr: expected a number",
    )
    yield text("newer version", "version: 9\n", "version 9", "FILE:1", "reads versions 1 and 2")
    yield text("version of words", "version: latest\n", "version latest", "FILE:1")
    yield text(
        "unicode digits", "optim:\n  lr: ١e-3\nmodel:\n  n_layer: ²\n", "FILE:4", "model.n_layer"
    )
    yield text(
        "unicode minus", "optim:\n  lr: 6e\u22124\n", "FILE:2", "optim.lr: expected a number"
    )
    yield text("decimal comma", "optim:\n  lr: 0,001\n", "FILE:2", "optim.lr: expected a number")
    yield text(
        "thousands",
        "budget:\n  tokens: 10,000\n",
        "FILE:2",
        "budget.tokens: expected a whole number",
    )
    yield text("hexadecimal", "seed: 0x10\n", "FILE:1", "seed: expected a whole number")
    yield text(
        "an expression",
        "budget:\n  batch_tokens: 8 * 1024\n",
        "FILE:2",
        "budget.batch_tokens: expected",
    )
    yield text(
        "a variable",
        "budget:\n  batch_tokens: ${BATCH}\n",
        "FILE:2",
        "budget.batch_tokens: expected",
    )
    yield text("json with a comment", '{"seed": 1, // first\n "model": {}}\n', "FILE:")
    yield text("toml", "[model]\nn_layer = 3\n", "FILE:")
    yield text("python", "n_layer = 3\nn_head = 2\n", "FILE:1")
    yield text("html", "<html><body>404</body></html>\n", "FILE:1")
    yield text("control character", "seed: \x07\n", "not valid YAML", "FILE")
    for name, data in {
        "latin-1": "data: {path: na\u00efve}\n".encode("latin-1"),
        "utf-16": "seed: 1\n".encode("utf-16"),
        "NUL": b"seed: \x00\n",
        "binary": bytes(range(256)) * 8,
        "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
        "png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR",
        "surrogate": b"data: {path: \xed\xa0\x80}\n",
        "cut character": b"data: {path: \xf0\x9f\x98",
    }.items():
        yield BadConfig(f"bytes: {name}", ("FILE",), data)
    yield BadConfig("bytes: 2 MiB", ("FILE", "larger than 1 MiB"), b"seed: 1\n" * (1 << 18))


def wrong_sections() -> Iterator[BadConfig]:
    for section in (
        "model",
        "data",
        "optim",
        "budget",
        "machine",
        "save",
        "evaluate",
        "sample",
        "log",
    ):
        key = next(key for key in FIELDS if key.startswith(f"{section}."))
        wrong = section[0] + section[2] + section[1] + section[3:]
        says = f"unknown key '{key.replace(section, wrong, 1)}'", f"did you mean '{key}'?"
        yield text(
            f"misspelt section {wrong}",
            f"{wrong}:\n  {key.partition('.')[2]}: 1\n",
            "FILE:2",
            *says,
        )
        yield text(
            f"{section} is a value", f"{section}: 3\n", "FILE:1", f"{section} is a section, got '3'"
        )
        yield text(
            f"{section} is a list",
            f"{section}: [3]\n",
            "FILE:1",
            f"{section} is neither a value nor a section",
        )


def wrong_overrides() -> Iterator[BadConfig]:
    yield override("a.b=c", "unknown key 'a.b'", "command line")
    yield override("model.=1", "unknown key 'model.'", "'model.")
    yield override("model..n_layer=3", "unknown key 'model..n_layer'", "'model.n_layer'")
    yield override("model.n_layer.=3", "unknown key 'model.n_layer.'", "'model.n_layer'")
    yield override("model.n_layer=", "model.n_layer: expected a whole number, got ''")
    yield override("model.n_layer==3", "model.n_layer: expected a whole number, got '=3'")
    yield override("model.n_layer= 3 4", "model.n_layer: expected a whole number")
    yield override("MODEL.N_LAYER=3", "unknown key 'MODEL.N_LAYER'", "'model.n_layer'")
    yield override("Optim.LR=3", "unknown key 'Optim.LR'", "'optim.lr'")
    yield override("n_layer=3", "unknown key 'n_layer'", "'model.n_layer'")
    yield override("lr=3", "unknown key 'lr'", "'optim.lr'")
    yield override("model.n-layer=3", "model.n-layer=3", "section.field=value: model.n_layer=")
    yield override("model/n_layer=3", "model/n_layer=3", "section.field=value: model.n_layer=")
    yield override("model.n_layer:3", "model.n_layer:3", "section.field=value", "model.n_layer=")
    yield override("model.n_layer", "model.n_layer", "section.field=value", "model.n_layer=")
    yield override("=3", "=3", "section.field=value")
    yield override(".n_layer=3", ".n_layer=3", "section.field=value: model.n_layer=")
    yield override("--model.n_layer=3", "--model.n_layer=3", "without --: model.n_layer=")
    yield override("--optim.lr=1e-3", "--optim.lr=1e-3", "without --: optim.lr=")
    yield override("--learning_rate=1e-3", "--learning_rate=1e-3", "optim.lr=")
    yield override("-lr", "unrecognized arguments: -lr")
    yield override("optim.lr=1e-3tok", "optim.lr: expected a number")
    yield override("save.every=10 minutes", "save.every: expected a duration")
    yield override("save.every=10minutes", "save.every: expected a duration")
    yield override("budget.tokens=3ep", "budget.tokens: expected a whole number")
    yield override("budget.tokens=10GB", "budget.tokens: expected a whole number")
    yield override("budget.steps=0.5dur", "budget.steps: expected a whole number")
    yield override("budget.steps=1000tok", "budget.steps: expected a whole number")
    yield override("budget.tokens=300steps", "budget.tokens: expected a whole number")
    yield override("model.n_layer=12tok", "model.n_layer: expected a whole number")
    yield override("machine.threads=many", "machine.threads: expected a whole number")
    yield override("machine.micro_batch=-4", "machine.micro_batch: must be at least 1, got -4")
    yield override("save.time_limit=soon", "save.time_limit", "90m")
    yield override("save.time_limit=-5m", "save.time_limit", "90m")
    yield override("model.n_layer=1e400", "model.n_layer: expected a whole number")
    yield override("seed=99999999999999999999", "seed: must be at least 0 and at most")
    yield override("seed=-1", "seed: must be at least 0")
    for key in ("sample.top_k", "budget.steps", "model.n_layer", "budget.batch_tokens"):
        yield override(f"{key}=1e30", f"{key}: must be at least ", "and at most 1e+15, got 1e30")
    yield override("data.path=nothing://bucket/data", "not an address: Protocol not known: nothing")
    yield override(
        "save.mirror=nothing://bucket/run", "not an address: Protocol not known: nothing"
    )
    yield override(
        "data.path=s3://KEY:a-secret@bucket/data",
        "an address holds credentials — s3://***@bucket/data",
    )


def other_tools() -> Iterator[BadConfig]:
    """What nanoGPT, llm.c, Composer, transformers and litgpt call our fields."""
    ours = {
        "optim.learning_rate": "optim.lr",
        "optim.max_lr": "optim.lr",
        "optim.min_lr": "optim.min_lr_ratio",
        "optim.warmup_iters": "optim.warmup",
        "optim.warmup_steps": "optim.warmup",
        "optim.betas": "optim.beta1",
        "optim.wd": "optim.weight_decay",
        "optim.max_grad_norm": "optim.grad_clip",
        "optim.gradient_clipping": "optim.grad_clip",
        "optim.lr_scheduler": "optim.schedule",
        "optim.optimizer": "optim.name",
        "model.n_embd": "model.d_model",
        "model.hidden_size": "model.d_model",
        "model.dim": "model.d_model",
        "model.block_size": "model.seq_len",
        "model.context_length": "model.seq_len",
        "model.max_seq_len": "model.seq_len",
        "model.n_positions": "model.seq_len",
        "model.num_layers": "model.n_layer",
        "model.num_hidden_layers": "model.n_layer",
        "model.num_attention_heads": "model.n_head",
        "model.num_key_value_heads": "model.n_kv_head",
        "model.intermediate_size": "model.d_ff",
        "model.n_inner": "model.d_ff",
        "model.padded_vocab_size": "model.vocab_size",
        "model.vocab": "model.vocab_size",
        "model.attn_pdrop": "model.dropout",
        "model.activation_function": "model.mlp",
        "model.tie_word_embeddings": "model.tie_embeddings",
        "model.init_from": "model.init",
        "data.dataset": "data.path",
        "budget.max_iters": "budget.steps",
        "budget.max_steps": "budget.steps",
        "budget.num_train_epochs": "budget.epochs",
        "budget.max_tokens": "budget.tokens",
        "budget.batch_size": "budget.batch_tokens",
        "budget.global_batch_size": "budget.batch_tokens",
        "budget.train_batch_size": "budget.batch_tokens",
        "machine.dtype": "machine.precision",
        "machine.per_device_train_batch_size": "machine.micro_batch",
        "machine.gradient_accumulation_steps": "machine.micro_batch",
        "machine.gradient_checkpointing": "machine.activation_checkpointing",
        "machine.fsdp": "machine.sharding",
        "machine.tp": "machine.tensor_parallel",
        "save.save_interval": "save.every",
        "save.save_total_limit": "save.keep_last",
        "evaluate.eval_interval": "evaluate.every",
        "evaluate.eval_iters": "evaluate.tokens",
        "log.log_interval": "log.every",
    }
    for number, (theirs, key) in enumerate(ours.items()):
        name = theirs if number % 2 else theirs.partition(".")[2]
        yield override(f"{name}=8", f"unknown key '{name}'", f"did you mean '{key}'?")


def conflicts() -> Iterator[BadConfig]:
    yield override(
        "model.n_head=7",
        "model.n_head: 7 heads do not divide d_model 768",
        "nearest that do: 4, 6, 8",
    )
    yield override(
        "model.d_model=770", "model.n_head: 12 heads do not divide d_model 770", "nearest that do"
    )
    yield override("model.n_kv_head=5", "model.n_kv_head", "nearest that divide: 3, 4, 6")
    yield override(
        "budget.batch_tokens=1000", "is not a multiple of seq_len 1024", "nearest that are: 1024"
    )
    yield override(
        "machine.micro_batch=5", "does not divide the batch of 1 sequences", "nearest that do: 1"
    )
    yield override("model.preset=gpt5", "unknown preset 'gpt5'", "choose one of")
    yield override(
        "model.preset=gpt2-xl", "unknown preset 'gpt2-xl'", "did you mean gpt2-1558m? choose one of"
    )
    yield override(
        "model.preset=lama-5m", "unknown preset 'lama-5m'", "did you mean llama-5m? choose one of"
    )
    yield override("machine.device=tpu", "unknown device 'tpu'", "use auto, cpu")
    yield override("optim.warmup=2dur", "optim.warmup", "at most 1dur")
    yield override("optim.decay=1.5dur", "optim.decay", "at most 1dur")
    lines = "budget:\n  steps: 5\n  tokens: 1e9\n"
    yield text(
        "two lengths", lines, "budget.tokens: steps and tokens are both set", "FILE:3", "set one of"
    )
    lines = "budget: {steps: 5, epochs: 1, tokens: 3}\n"
    yield text("three lengths", lines, "steps and tokens and epochs are both set", "FILE:1")
    lines = "model:\n  pos_emb: rotary\n  n_head: 12\n  d_model: 36\nbudget: {steps: 1}\n"
    yield text(
        "odd head", lines, "model.n_head: rotary embedding needs an even head size", "FILE:3"
    )
    lines = "model:\n  rope_factor: 8\n  rope_low: 9\nbudget: {steps: 1}\n"
    yield text("rope", lines, "model.rope_low: rope_low 9 is not below rope_high 4", "FILE:3")
    lines = "machine:\n  device: cpu\n  precision: fp16\nbudget: {steps: 1}\n"
    yield text("fp16 on a CPU", lines, "machine.precision: fp16 is not trained on a CPU", "FILE:3")
    lines = "machine:\n  tensor_parallel: 2\n  activation_checkpointing: gelu\nbudget: {steps: 1}\n"
    yield text("gelu", lines, "machine.activation_checkpointing: ", "FILE:3", "use none or block")
    lines = "machine:\n  sharding: zero3\n  master_weights: on\nbudget: {steps: 1}\n"
    yield text("masters", lines, "machine.master_weights: ", "FILE:3", "use auto")
    lines = "optim:\n  floor: 0.1\n  min_lr_ratio: 0.2\n"
    yield text("old and new name", lines, "'optim.min_lr_ratio' is given twice", "FILE:3", "FILE:2")


def wrong_names() -> Iterator[BadConfig]:
    near = {
        "quikstart": "quickstart",
        "gpt2": "gpt2-124m",
        "gpt2-xl": "gpt2-1558m",
        "gpt2-124": "gpt2-124m",
    }
    near |= {"shakespear": "shakespeare", "GPT2-124M": "gpt2-124m", "quickstart.yml": "quickstart"}
    near |= {"llama": "llama-110m' or 'llama-5m"}
    for name, recipe in near.items():
        yield options(name, f"no recipe named '{name}'", f"did you mean '{recipe}'?")
    yield options("nowhere/x.yaml", "no recipe named 'nowhere/x.yaml'")
    yield options(".", "'.' is a folder without a run")
    yield BadConfig("options: empty name", ("no recipe",), words=("",))
    yield options("x" * 300, "File name too long")
    yield options("/dev/null/x", "no recipe named", "path of a .yaml file")
    yield BadConfig("options: NUL in the name", ("no recipe named",), words=("a\0b",))
    yield BadConfig("options: line break in the name", ("no recipe named",), words=("a\nb",))


def wrong_options() -> Iterator[BadConfig]:
    yield BadConfig(
        "options: no recipe", ("no recipe given", "give one of RECIPE, --llmc"), words=()
    )
    yield options("RECIPE RECIPE", "unrecognized arguments")
    yield options("RECIPE --outt x", "unrecognized arguments: --outt x")
    yield options("RECIPE --nproc 0", "--nproc is 0")
    yield options("RECIPE --nproc two", "--nproc", "invalid int value: 'two'")
    yield options("RECIPE --restarts -1", "--restarts")
    yield options("RECIPE --out", "--out", "expected one argument")
    yield options(
        "RECIPE --out s3://bucket/run", "not a path on this machine", "save.mirror=s3://bucket/run"
    )
    yield options("RECIPE --composer x.yaml", "recipe and composer are both given")
    yield options("RECIPE --init", "--init")


def wrong_environment() -> Iterator[BadConfig]:
    for name, value, *says in (
        ("MEGATOKEN_PRECISION", "fp23", "MEGATOKEN_PRECISION", "fp23"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is 'two'"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set"),
        ("RANK", "-1", "rank -1 of 1"),
        ("LOCAL_RANK", "7", "on this machine 7 of 1"),
        ("MASTER_PORT", "http", "MASTER_PORT is 'http'"),
    ):
        rank = {} if name.startswith("MEGATOKEN") else {"RANK": "0", "WORLD_SIZE": "1"}
        yield BadConfig(
            f"environment: {name}={value}", tuple(says), environment={**rank, name: value}
        )


def wrong_translations() -> Iterator[BadConfig]:
    for flag, command, *says in (
        ("--llmc", "-e", "-e has no value"),
        ("--llmc", "-e d12 -zz 3", "llm.c setting -zz is not understood"),
        ("--llmc", "-e d13", "no model called 'd13'"),
        ("--llmc", "-e d12 -b four", "-b is 'four', not a whole number"),
        ("--llmc", "-e d12 -l nan", "-l is 'nan', not a number"),
        ("--llmc", "-e d12 -k cosin", "-k cosin is not supported", "supported: cosine"),
        ("--llmc", "-e d12 -b 4 -t 1024 -d 1000", "1000 tokens a step are not a multiple of 4096"),
        ("--llmc", "-e d12 -t 4096", "sequences of 4096 tokens for a model of 1024 positions"),
        ("--llmc", "-e 'd12", "cannot read the command", "check its quotes"),
        ("--llmc", "-e d12 -a 2", "-a 2 is not supported"),
        (
            "--nanogpt",
            "--learning_rat=1",
            "nanoGPT setting learning_rat is not understood",
            "learning_rate",
        ),
        ("--nanogpt", "--learning_rate", "cannot read '--learning_rate'", "--name=value"),
        ("--nanogpt", "--max_iters=many", "max_iters is 'many', not a whole number"),
        ("--nanogpt", "nowhere.py", "cannot read it", "nowhere.py"),
        ("--nanogpt", "--dropout=nan", "dropout is 'nan', not a number"),
        ("--nanogpt", "--init_from=llama", "init_from llama is not supported"),
        ("--nanogpt", "--dtype=int8", "dtype int8 is not supported"),
        ("--nanogpt", "--lr_decay_iters=5", "until iteration 5, within the warm-up of 2000"),
        ("--composer", "nowhere.yaml", "cannot read recipe"),
    ):
        yield BadConfig(f"{flag}: {command}", tuple(says), words=(f"{flag}={command}",))
    wrong = b"max_duration: 1ba\nmodel: {name: gpt2}\noptimizer: {lr: &x 1}\n"
    yield BadConfig("--composer: anchor", (TAGS, "FILE:3"), wrong, ("--composer", "RECIPE"))
    yield BadConfig(
        "--composer: list", ("no optimizer", "FILE"), b"- 1\n", ("--composer", "RECIPE")
    )


Kind = Callable[[], Iterator[BadConfig]]
KINDS: tuple[Kind, ...] = (
    *(misspelt_fields, wrong_values, broken_yaml, wrong_sections, wrong_overrides, other_tools),
    *(conflicts, wrong_names, wrong_options, wrong_environment, wrong_translations),
)
