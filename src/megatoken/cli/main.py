"""The command line: one function per subcommand.

Modules that import torch are imported inside their command: arguments and recipes are checked before, in a tenth of a
second.
"""

import argparse
import dataclasses
import io
import json
import math
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from megatoken.checkpoint.commit import list_steps, step_folder
from megatoken.checkpoint.manifest import encode_model_config, verify
from megatoken.cli.arguments import (
    TRANSLATED,
    Command,
    build_parser,
    check_eval,
    parse,
    refuse_without_effect,
)
from megatoken.cli.completion import write_completion
from megatoken.cli.plan import find_vocabulary, plan, resolve_recipe_or_preset
from megatoken.cli.quickstart import quickstart
from megatoken.cli.runs import find_own_data, show_runs
from megatoken.config.load import (
    RUN_CONFIG,
    ResolvedConfig,
    find_run,
    list_recipes,
    read_recipe,
    render,
    resolve,
    resolve_run,
)
from megatoken.config.model_config import describe_heads
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, Config
from megatoken.console import Console, format_count, format_memory
from megatoken.distributed.env import read_dist_env
from megatoken.distributed.parallel_dims import ParallelDims, check_dims
from megatoken.errors import CheckpointError, ConfigError, ExitCode, MegatokenError, StorageError
from megatoken.eval.tasks import find_tasks
from megatoken.launch.local import COMMAND, RESTARTS, launch, stop_at_once, write_stop_marker
from megatoken.launch.scripts import GPU, TIME, Job, check_batch, check_job, name_job, write_script
from megatoken.model import flops
from megatoken.optim.costs import count_saved_bytes
from megatoken.redact import RedactedStream, redact, redact_values
from megatoken.system.atomic_write import storage_errors
from megatoken.system.environment import heartbeat_file, prepare_process
from megatoken.system.object_store import is_address
from megatoken.system.process import at_parent_death
from megatoken.train.metrics_log import METRICS
from megatoken.train.run_folder import BUDGET_KEYS, check_folder

NEED_WEIGHTS = (
    "finetune",
    "sft",
    "dpo",
    "reward",
    "grpo",
    "ppo",
)  # recipes that train given weights
TRAIN_ON = {"chat": "sft", "preference": "dpo", "prompt": "grpo"}  # the recipe for a kind of rows
Result = tuple[int, dict[str, Any]]  # exit code, and the object that --json prints


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    try:
        prepare_process()
        options = parse(words or ["--help"], COMMANDS)
        code, answer = options.call(options)
        if options.json and answer is not None:
            try:
                print(json.dumps(redact_values(answer)), flush=True)
            except OSError:
                if options.command != "train":  # a run is saved: its exit code counts
                    raise
        return int(code)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except (MegatokenError, OSError) as raised:
        error = raised if isinstance(raised, MegatokenError) else name_system_error(raised)
        with suppress(OSError):  # of a terminal that was closed
            if "--debug" in words:
                traceback.print_exc()
            sys.stderr.write(
                f"{_rank_prefix()}error: {error}\n"
            )  # one write, so that lines of ranks do not mix
        return int(error.code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def prepare_streams() -> None:
    """Open empty streams for those that this process was started without; hide secrets in stderr.

    What stdout cannot encode becomes ?.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (open to the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not isinstance(sys.stderr, RedactedStream):
        sys.stderr = RedactedStream(sys.stderr)


def name_system_error(error: OSError) -> MegatokenError:
    """The one-line error of a path that the system refuses: too long a name, a folder that may not be entered."""
    if error.filename is None:
        return StorageError(
            f"cannot write: {error.strerror or error}", "standard output", "send it somewhere else"
        )
    return StorageError(
        error.strerror or str(error), error.filename, "check the path and its permissions"
    )


def _rank_prefix() -> str:
    try:
        rank = read_dist_env().rank
    except MegatokenError:  # the error being reported
        return ""
    return f"[rank {rank}] " if rank else ""


def run_prepare(options: argparse.Namespace) -> Result:
    """prepare: tokenize text into shards."""
    from megatoken.cli.progress import PrepareBar
    from megatoken.data.chat_formats import peek_format
    from megatoken.data.prepare import prepare
    from megatoken.data.remote import begin_upload, upload_dataset
    from megatoken.data.sources import HUB, find_source

    names = ("tokenizer", "workers", "val_fraction", "shard_tokens", "invalid", "text_key", "root")
    has_keys = True
    if options.source not in HUB:  # those hold text in rows, and listing them takes a while
        source = find_source(options.source, options.root)
        if found := peek_format(source, options.text_key):
            return _prepare_chats(options, TRAIN_ON[found.kind])
        has_keys = source.has_rows
    refuse_without_effect(
        ("--text-key", options.text_key != "text", has_keys, "rows of JSON, CSV and parquet"),
        ("--context", options.context is not None, False, "rows of conversations"),
        ("--long", options.long != "fail", False, "rows of conversations"),
    )
    folder = begin_upload(options.out) if is_address(options.out) else options.out
    with PrepareBar(options.console) as bar:
        prepared = prepare(options.source, folder, on_progress=bar.update, **_pick(options, *names))
    if folder != options.out:
        upload_dataset(folder, options.out, options.console.print)
        options.console.print(f"uploaded; a copy stays in {folder}")
    bar.finish(options.out, prepared)
    return ExitCode.DONE, dataclasses.asdict(prepared)


def _prepare_chats(options: argparse.Namespace, recipe: str) -> Result:
    """Conversations, preferences or prompts: rows for the context of the model whose tokenizer is named.

    recipe: that trains on them, for what to type next.
    """
    from megatoken.cli.progress import PrepareBar
    from megatoken.data.prepare_chats import prepare_chats
    from megatoken.data.shard_format import MANIFEST_NAME
    from megatoken.data.sources import find_source
    from megatoken.data.tokenizer import load_tokenizer

    if is_address(options.out):
        raise ConfigError(
            "conversations are prepared in a folder", str(options.out), "name one, and copy it"
        )
    refuse_without_effect(
        ("--text-key", options.text_key != "text", False, "text"),
        ("--workers", options.workers != 0, False, "text"),
    )
    named, init = Path(options.tokenizer), "RUN"
    is_tokenizer = any((named / name).is_file() for name in ("tokenizer.json", MANIFEST_NAME))
    if (named.is_dir() and not is_tokenizer) or (named / "config.json").is_file():
        from megatoken.convert.load_pretrained import load_pretrained

        loaded = load_pretrained(options.tokenizer, options.console.warn)
        tokenizer, seq_len, init = (
            loaded.tokenizer,
            options.context or loaded.model.config.seq_len,
            options.tokenizer,
        )
    elif not options.context and (named.exists() or options.tokenizer in ("gpt2", "bytes")):
        fix = "name the model by --tokenizer RUN, or a tokenizer and --context N"
        raise ConfigError("rows of conversations are prepared for a model", "--tokenizer", fix)
    else:
        tokenizer, seq_len = load_tokenizer(options.tokenizer), options.context
    own = _pick(options, "val_fraction", "shard_tokens", "invalid", "long")
    prepared = prepare_chats(
        find_source(options.source, options.root), options.out, tokenizer, seq_len=seq_len, **own
    )
    with PrepareBar(options.console) as bar:
        bar.finish(options.out, prepared, f"{recipe} --init {shlex.quote(init)}")
    return ExitCode.DONE, dataclasses.asdict(prepared)


def run_train(options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """train: train a recipe into a run folder."""
    add_settings(
        options,
        ("--init", "model.init", options.init),
        ("--overfit-batch", "data.order", "one-batch" if options.overfit_batch else None),
        ("--reward", "objective.reward", options.reward),
    )
    refuse_without_effect(
        ("--restarts", options.restarts is not None, options.nproc != 1, "--nproc above 1")
    )
    with stop_at_once(options.ending):
        resolved, named_out = find_recipe(options)
        if options.ending and heartbeat_file() is None and (ask := at_parent_death(signal.SIGTERM)):
            ask()  # torchrun is the parent
        out = options.out or named_out or Path("runs") / resolved.name
        check_init(options.recipe, resolved.config, out)
        if read_dist_env().world_size == 1:  # before torch is loaded, and without starting ranks
            allowed = BUDGET_KEYS if options.extend else ()
            check_folder(out, resolved.config, allow_changes=options.allow_changes, allowed=allowed)
        restarts = RESTARTS if options.restarts is None else options.restarts
        if (code := launch_ranks(options, restarts, resolved.config)) is not None:
            return write_stop_marker(options.ending) if code == ExitCode.STOPPED else code, None
        is_main = read_dist_env().is_main_process
        if is_main and options.recipe:
            for note in resolved.notes:
                options.console.print(f"note: {note}")
        elif is_main:
            options.console.print(_render_with_notes(resolved, given_only=True))
        from megatoken.pretrain import Trainer

        fields = _pick(options, "console", "explain", "allow_changes", "extend", "reward")
        summary = Trainer(resolved, out, **fields).fit()
        answer = dataclasses.asdict(summary) if is_main else None
        return write_stop_marker(
            options.ending
        ) if summary.code == ExitCode.STOPPED else summary.code, answer


def add_settings(options: argparse.Namespace, *rows: tuple[str, str, Any]) -> None:
    """Add options that stand for a setting to the overrides. rows: option, setting, its value or None.

    Raises ConfigError for an empty value, and for one that is given in both ways.
    """
    given = {word.partition("=")[0]: word for word in options.overrides}
    for flag, key, value in rows:
        if value == "":
            raise ConfigError(f"{flag} is empty", flag, "give a value, or leave it out")
        if value is not None and key in given:
            raise ConfigError(
                f"{flag} and {given[key]} are both given",
                "command line",
                f"{flag} sets {key}: give one",
            )
        options.overrides += [f"{key}={value}"] if value is not None else []


def launch_ranks(
    options: argparse.Namespace, restarts: int = 0, config: Config | None = None
) -> int | None:
    """Run this command in `--nproc` processes; their exit code, or None in a process that must run it itself.

    config: of the run, whose batch has to divide among them.
    """
    dist_env = read_dist_env()
    if restarts < 0:
        raise ConfigError(f"--restarts is {restarts}", "--restarts", "give 0 or more")
    if options.nproc > 1 and dist_env.local_world_size == 1:
        if (
            config is not None and config.objective.name == "pretrain" and not config.model.init
        ):  # sizes are in the recipe
            check_batch(config, dist_env.world_size, options.nproc, "--nproc")
        return launch([*COMMAND, *options.words], options.nproc, restarts, dist_env)
    if options.nproc < 1:
        raise ConfigError(f"--nproc is {options.nproc}", "--nproc", "give 1 or more")
    if options.nproc not in (1, dist_env.local_world_size):
        what = f"--nproc {options.nproc} in one of {dist_env.local_world_size} processes of this machine"
        raise ConfigError(
            what,
            "--nproc",
            "let torchrun or srun start one process on each machine, or leave it out",
        )
    return None


def find_recipe(options: argparse.Namespace) -> tuple[ResolvedConfig, Path | None]:
    """The resolved recipe, and the run folder named by a recipe of another program."""
    given = [
        name
        for name in ("recipe", *(flag[2:] for flag in TRANSLATED))
        if getattr(options, name) is not None
    ]
    if len(given) != 1:
        what = "no recipe given" if not given else f"{' and '.join(given)} are both given"
        raise ConfigError(what, "command line", f"give one of RECIPE, {', '.join(TRANSLATED)}")
    if options.recipe is not None:
        if folder := find_run(options.recipe):
            return resolve_run(folder, find_run_config(folder), options.overrides), folder
        resolved = resolve(options.recipe, options.overrides)
        check_recipe(resolved.config)
        return resolved, None
    from megatoken.convert.recipes import translate

    translation = translate(options)
    resolved = translation.resolve(options.overrides)
    check_recipe(resolved.config)
    return dataclasses.replace(
        resolved, notes=(*translation.notes, *resolved.notes)
    ), translation.out


def find_run_config(folder: Path) -> Path:
    """The config.yaml of a run; where that is unreadable, empty or cut, the copy in the newest undamaged checkpoint."""
    own, keys = folder / RUN_CONFIG, set[str]()
    with suppress(ConfigError):
        keys = {assignment.key for assignment in read_recipe(own)}
    for step in reversed(list_steps(folder / "checkpoints")):
        copy = step_folder(folder / "checkpoints", step) / RUN_CONFIG
        with suppress(CheckpointError):
            verify(copy.parent, hashes=lambda name: name == RUN_CONFIG)
            return (
                own if keys.issuperset(assignment.key for assignment in read_recipe(copy)) else copy
            )
    return own


def check_recipe(config: Config) -> None:
    """Raise what the run would, as far as that is known without its data, devices and processes."""
    check_dims(
        ParallelDims(tp_size=config.machine.tensor_parallel),
        config.model.resolve(config.model.vocab_size),
    )
    if config.evaluate.tasks:
        find_tasks([name.strip().removesuffix("?") for name in config.evaluate.tasks.split(",")])
    if config.data.tokenizer != FIELDS["data.tokenizer"].default:
        from megatoken.data.tokenizer import load_tokenizer

        load_tokenizer(config.data.tokenizer)


def check_init(recipe: str, config: Config, out: Path) -> None:
    """Raise ConfigError for NEED_WEIGHTS without weights, unless the run in `out` has its own."""
    if recipe in NEED_WEIGHTS and not config.model.init and not list_steps(out / "checkpoints"):
        fix = "name a run or a Hugging Face folder: --init RUN_OR_HF_DIR, or model.init=..."
        raise ConfigError("no weights to go on with", "--init", fix)


def _render_with_notes(resolved: ResolvedConfig, *, given_only: bool = False) -> str:
    notes = "".join(f"# {note}\n" for note in resolved.notes)
    return notes + render(resolved.config, resolved.origins, given_only=given_only)


def run_launch(options: argparse.Namespace) -> Result:
    """launch: check a recipe for a number of processes, then write a script that starts it."""
    resolved = resolve(options.recipe, options.overrides)
    out = options.out or find_run(options.recipe) or Path("runs") / resolved.name
    check_recipe(resolved.config)
    check_init(options.recipe, resolved.config, out)
    words = [options.recipe, "--out", str(out), *options.overrides]
    is_type, engine = options.gpus not in (None, "none"), options.engine
    refuse_without_effect(
        (
            "--gpus",
            is_type,
            engine == "skypilot",
            "skypilot, or none; their number is --nproc, a kind of node of slurm --sbatch constraint=a100",
        ),
        ("--time", options.time, engine == "slurm", "slurm"),
    )
    fields = _pick(options, "nodes", "nproc", "image", "partition", "account", "namespace")
    fields |= {"gpus": options.gpus or GPU, "time": options.time or TIME}
    job = Job(
        name=name_job(resolved.name),
        train_args=words,
        setup=options.setup,
        sbatch=options.sbatch,
        **fields,
    )
    check_job(job, resolved.config)
    script = redact(write_script(options.engine, job))
    if options.write:
        with storage_errors(options.write.parent, fix="choose another file"):
            if options.write.exists() and options.write.read_text("utf-8", "replace") != script:
                fix = "remove it, or choose another file"
                raise ConfigError("the file is there, and is not this script", options.write, fix)
            options.write.write_text(script, encoding="utf-8")
        options.console.print(f"written: {options.write}")
    elif not options.json:
        print(script, end="")
    return ExitCode.DONE, {"script": script, "processes": job.nodes * job.nproc}


def run_doctor(options: argparse.Namespace) -> Result:
    """doctor: check this machine; exit code 2 if a run would fail on it."""
    from megatoken.cli.doctor import run_checks

    findings = run_checks(options.folder)
    for finding in findings:
        remedy = f" — {finding['remedy']}" if finding["remedy"] else ""
        options.console.print(
            f"{finding['state']:<7} {finding['name']:<10} {finding['found']}{remedy}"
        )
    code = (
        ExitCode.CONFIG if any(finding["state"] == "bad" for finding in findings) else ExitCode.DONE
    )
    return code, {"findings": findings}


def run_config(options: argparse.Namespace) -> Result:
    """config: print the resolved recipe."""
    resolved, _ = find_recipe(options)
    if not options.json:
        print(redact(_render_with_notes(resolved)), end="")
    return ExitCode.DONE, {
        "values": dataclasses.asdict(resolved.config),
        "origins": resolved.origins,
    }


def run_describe(options: argparse.Namespace) -> Result:
    """describe: print the parameters, FLOPs and memory of a model, or its tensors."""
    if options.tensors:
        return ExitCode.DONE, describe_tensors(options)
    resolved, model, _ = resolve_recipe_or_preset(options.preset, options.overrides)
    config = resolved.config
    answer = {
        "parameters": flops.count_parameters(model),
        "matmul_parameters": flops.count_matmul_parameters(model),
        "flops_per_token_full": flops.flops_per_token(model, causal=False),
        "flops_per_token_causal": flops.flops_per_token(model, causal=True),
        "state_bytes": count_saved_bytes(config.optim.name, model),
        "expected_initial_loss": flops.expected_initial_loss(model),
        **encode_model_config(model),
    }
    note = (
        ""
        if config.model.vocab_size
        else f" (the recipe leaves it to the tokenizer: {find_vocabulary(config)[1]})"
    )
    kind = f"{model.norm}, {model.mlp} of {model.d_ff:,}, {model.pos_emb} positions, heads of {model.d_head}"
    kind += f"{'' if model.bias else ', no biases'}, output layer {'tied' if model.tie_embeddings else 'of its own'}"
    kind += "".join(f", {name}" for name in model.switched_on)
    full, causal = answer["flops_per_token_full"], answer["flops_per_token_causal"]
    rows = [
        (
            "model",
            f"{options.preset}: {model.n_layer} layers, {describe_heads(model)}, width {model.d_model:,}",
        ),
        ("of", kind),
        ("context", f"{model.seq_len:,} tokens"),
        ("vocabulary", f"{model.vocab_size:,} ids, padded to {model.padded_vocab_size:,}{note}"),
        ("parameters", f"{answer['parameters']:,}"),
        ("in products", f"{answer['matmul_parameters']:,} (the output layer counted once)"),
        ("FLOPs/token", f"{full:,} full attention, {causal:,} causal"),
        (
            "state",
            f"{format_memory(answer['state_bytes'])} of fp32 weights and the state of {config.optim.name}",
        ),
        ("first loss", f"ln(V) = {answer['expected_initial_loss']:.3f} nats"),
    ]
    if not options.json:
        options.console.table(rows)
    return ExitCode.DONE, answer


def describe_tensors(options: argparse.Namespace) -> dict[str, Any]:
    """Print the tensors of a preset, a recipe or the file of a model."""
    from megatoken.convert.list_tensors import list_parameters, list_tensors

    name = options.preset
    if name in (*PRESETS, *list_recipes()) or Path(name).suffix in (".yaml", ".yml"):
        tensors = list_parameters(resolve_recipe_or_preset(name, options.overrides)[1])
    elif options.overrides:
        raise ConfigError(
            "a model's file has its own sizes",
            options.overrides[0],
            "leave it out, or name a preset",
        )
    else:
        tensors = list_tensors(name, options.console.warn)
    rows = [{**tensor._asdict(), "parameters": math.prod(tensor.shape)} for tensor in tensors]
    width, total = (
        max((len(row["name"]) for row in rows), default=0),
        sum(row["parameters"] for row in rows),
    )
    for row in () if options.json else rows:
        shape = " x ".join(map(str, row["shape"]))
        options.console.print(
            f"{row['name']:<{width}}  {shape:<14} {row['dtype']:<9}{row['parameters']:>16,}"
        )
    options.console.print(f"{total:,} numbers in {format_count(len(rows), 'tensor')}")
    return {"tensors": rows, "parameters": total}


def run_dryrun(options: argparse.Namespace) -> Result:
    """dryrun: estimate memory and communication of one process of many."""
    add_settings(
        options,
        ("--tp", "machine.tensor_parallel", options.tp),
        ("--shard", "machine.sharding", options.shard),
    )
    resolved, model, _ = resolve_recipe_or_preset(options.preset, options.overrides)
    config = resolved.config
    from megatoken.estimate.dry_run import check_fit, describe_estimate, dry_run, gpu_memory_bytes

    memory_bytes = gpu_memory_bytes(options.gpu)
    estimate = dry_run(config, model, options.gpus, memory_bytes)
    fits, advice = check_fit(estimate, config, options.gpu, memory_bytes)
    model_row = ("model", f"{options.preset} on {options.gpus:,} x {options.gpu}")
    options.console.table([model_row, *describe_estimate(estimate)])
    options.console.print(advice)
    return ExitCode.DONE, {
        **dataclasses.asdict(estimate),
        "gpu": options.gpu,
        "fits": fits,
        "advice": advice,
    }


def run_plan(options: argparse.Namespace) -> Result:
    """plan: what a run will take on some GPUs."""
    refuse_without_effect(("--law", options.law, options.budget is not None, "--budget"))
    for name in ("gpus", "deadline", "budget", "plot"):
        refuse_without_effect(
            (
                f"--{name}",
                getattr(options, name),
                not options.calibrate,
                "plans without --calibrate",
            )
        )
    return ExitCode.DONE, plan(options)


def refuse_greedy_choices(options: argparse.Namespace) -> None:
    """Raise ConfigError for options of sampling beside --temperature 0, which takes the likeliest token."""
    samples, purpose = options.temperature != 0, "temperatures above 0"
    refuse_without_effect(
        ("--top-k", options.top_k != 50, samples, purpose),
        ("--top-p", options.top_p != 1, samples, purpose),
        ("--n", getattr(options, "n", 1) > 1, samples, f"{purpose}: these texts would be the same"),
    )


def run_sample(options: argparse.Namespace) -> Result:
    """sample: continue a prompt."""
    refuse_greedy_choices(options)
    if find_run(options.prompt) and not Path(options.model).exists():
        words = shlex.join(["megatoken", "sample", options.prompt, options.model])
        raise ConfigError(
            "the model comes before the prompt", options.prompt, f"did you mean {words}?"
        )
    from megatoken.cli.sample import sample

    if options.prompt == "-" and sys.stdin.isatty():
        print("text to continue, then Ctrl-D on a line of its own:", file=sys.stderr)
    prompt = (
        sys.stdin.buffer.read()
        if options.prompt == "-"
        else options.prompt.encode(errors="surrogateescape")
    )
    return ExitCode.DONE, sample(options, prompt.decode(errors="replace"))


def run_chat(options: argparse.Namespace) -> Result:
    """chat: talk to a model."""
    refuse_greedy_choices(options)
    from megatoken.cli.chat import chat

    return ExitCode.DONE, chat(options)


def run_eval(options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """eval: score models on tasks, or compute their loss."""
    is_named = options.tasks is not None or options.data or options.chat or options.harness
    path = "" if is_named else find_own_data(options.models)
    options.data = options.data or path or None
    check_eval(options)
    if path:
        options.console.print(f"data: {path}, which the run trained on; --data names another")
    if options.tasks and not options.harness:
        find_tasks(options.tasks)
    if (code := launch_ranks(options)) is not None:
        return code, None
    from megatoken.cli.eval import answer_questions, evaluate_models

    if options.chat:
        return ExitCode.DONE, evaluate_models(options, answer_questions(options))
    if not options.harness:
        return ExitCode.DONE, evaluate_models(options)
    from megatoken.eval.lm_eval_adapter import run_harness

    return ExitCode.DONE, evaluate_models(options, run_harness)


def run_export(options: argparse.Namespace) -> Result:
    """export: write a model in another program's format."""
    from megatoken.convert.export import export

    return ExitCode.DONE, export(
        options.model, options.to, options.out, options.dtype, options.console
    )


def run_consolidate(options: argparse.Namespace) -> Result:
    """consolidate: merge the shards of a checkpoint into one file."""
    from megatoken.checkpoint.tensor_files import consolidate

    folder = consolidate(options.source, options.out, options.console.warn)
    options.console.print(f"written: {folder}")
    return ExitCode.DONE, {"folder": str(folder)}


def run_bench(options: argparse.Namespace) -> Result:
    """bench: run one benchmark; its JSON line is the last on stdout, without --json where that is no terminal."""
    from megatoken.bench.main import run

    answer = run(options, options.console)
    options.json = options.json or not sys.stdout.isatty()
    return ExitCode.DONE, answer


def run_verify(options: argparse.Namespace) -> Result:
    """verify: check every hash of a folder."""
    from megatoken.cli.verify import verify_folder

    report = verify_folder(options.folder)
    damaged = [str(error) for error in report.errors]
    for message in damaged:
        options.console.print(f"damaged: {message}")
    options.console.print(
        f"{report.kind} {options.folder}: {report.checked} checked, {len(damaged)} damaged"
    )
    code = report.errors[0].code if report.errors else ExitCode.DONE
    return code, {"kind": report.kind, "checked": report.checked, "damaged": damaged}


def run_plot(options: argparse.Namespace) -> Result:
    """plot: draw the curves of runs."""
    from megatoken.plots import draw_curves, draw_weights

    first: Path = options.runs[0]
    target = options.out or first / "plots"
    if (
        options.pictures and len(options.runs) == 1 and not (first / METRICS).is_file()
    ):  # a model, perhaps not ours
        refuse_without_effect(("--x", options.x, False, "the curves of runs"))
        pictures = draw_weights(
            first, options.out or Path("plots") / (first.stem if first.is_file() else first.name)
        )
    else:
        file = target / "curves.png" if target.is_dir() or not options.out else target
        pictures = [
            draw_curves(options.runs, file, options.x or "tokens", Console(to_stderr=True).warn)
        ]
        pictures += draw_weights(first, first / "plots") if options.pictures else []
    if not options.json:
        print(redact("\n".join(map(str, pictures))))
    return ExitCode.DONE, {"pictures": [str(path) for path in pictures]}


def run_runs(options: argparse.Namespace) -> Result:
    """runs: list or compare runs."""
    rows, differences = show_runs(options.folders, options.sort, options.console)
    return ExitCode.DONE, {"runs": rows, "differences": differences}


def run_completion(options: argparse.Namespace) -> Result:
    """completion: print a completion script."""
    script = write_completion(build_parser(COMMANDS), options.shell)
    if not options.json:
        print(script, end="")
    return ExitCode.DONE, {"script": script}


def _pick(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}


def _call_module(name: str) -> Command:
    """Return the command that is the function of its name in a module of its name."""

    def run(options: argparse.Namespace) -> Result:
        answer = getattr(import_module(f"megatoken.cli.{name}"), name)(options)
        return answer if isinstance(answer, tuple) else (ExitCode.DONE, answer)

    return run


COMMANDS: dict[str, Command] = {
    command.__name__.removeprefix("run_"): command
    for command in (
        *(
            run_prepare,
            run_train,
            run_launch,
            run_doctor,
            run_config,
            run_describe,
            run_dryrun,
            run_plan,
            run_sample,
        ),
        *(
            run_chat,
            run_eval,
            run_export,
            run_consolidate,
            run_bench,
            run_verify,
            run_plot,
            run_completion,
            run_runs,
        ),
    )
}
COMMANDS |= {
    name: _call_module(name) for name in ("serve", "report", "sync", "scaling", "sweep", "race")
}
COMMANDS["quickstart"] = lambda options: quickstart(options, COMMANDS)
