"""The command line: one function per subcommand, each a few lines around one call.

Arguments and recipes are checked before anything heavy is imported: a typo costs a tenth of a second, so modules that
import torch are imported inside their command (tests/test_architecture.py lists them).
"""

import argparse
import dataclasses
import json
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatoken.architecture import Model
from megatoken.arguments import FOREIGN, Call, check_eval, parse
from megatoken.config import Run
from megatoken.console import Console
from megatoken.errors import Exit, Fault
from megatoken.evaluate.tasks import find_tasks
from megatoken.hardware import prepare_process
from megatoken.model import count
from megatoken.parallel.launch import launch
from megatoken.parallel.scripts import ENGINES, Job, check_job, name_job
from megatoken.parallel.stopping import note_stop, stopping_at_once
from megatoken.parallel.topology import read_topology
from megatoken.presets import GPT2_VOCABULARY, PRESETS, Shape, describe_heads
from megatoken.recipe import Resolved, render, resolve, resolve_preset


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_process()
    try:
        options = parse(words, CALLS)
        options.words = words
        code, answer = options.call(options)
        if options.json and answer is not None:
            print(json.dumps(answer), flush=True)
        return int(code)
    except Fault as fault:
        if "--debug" in words:
            traceback.print_exc()
        sys.stderr.write(f"{name_process()}error: {fault}\n")  # whole, where several speak at once
        return int(fault.code)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def name_process() -> str:
    """Which rank speaks, where it is not the first or only one."""
    try:
        rank = read_topology().rank
    except Fault:  # that is what is being reported
        return ""
    return f"[rank {rank}] " if rank else ""


def run_prepare(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """prepare: text to shards."""
    from megatoken.data.prepare import prepare
    from megatoken.progress import PrepareBar

    with PrepareBar(to_stderr=options.json) as bar:
        done = prepare(
            options.source,
            options.out,
            tokenizer=options.tokenizer,
            workers=options.workers,
            val_fraction=options.val_fraction,
            shard_tokens=options.shard_tokens,
            invalid=options.invalid,
            text_key=options.text_key,
            root=options.root,
            part=options.part,
            on_progress=bar.update,
        )
    bar.finish(options.out, done, options.part)
    return Exit.DONE, dataclasses.asdict(done)


def run_train(options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """train: a recipe to a run folder."""
    options.overrides += [f"model.init={options.init}"] if options.init else []
    with stopping_at_once(options.ending):
        resolved, notes, named_out = find_recipe(options)
        if (code := launch_ranks(options)) is not None:
            return code, None
        return train(options, resolved, notes, options.out or named_out or Path("runs") / resolved.name)


def train(
    options: argparse.Namespace, resolved: Resolved, notes: list[str], out: Path
) -> tuple[int, dict[str, Any] | None]:
    """One process of a run."""
    console, speaks = Console(to_stderr=options.json), read_topology().is_first
    if not options.recipe and speaks:
        console.say("\n".join([*notes, render(resolved.run, resolved.origins, given_only=True)]))
    from megatoken.pretrain import pretrain

    summary = pretrain(resolved, out, console, explain=options.explain)
    answer = dataclasses.asdict(summary) if speaks else None
    return note_stop(options.ending) if summary.code == Exit.STOPPED else summary.code, answer


def launch_ranks(options: argparse.Namespace) -> int | None:
    """The exit code of `--nproc` processes that run this command, None for a process that is to run it itself."""
    topology = read_topology()
    if options.nproc > 1 and topology.world_size == 1:
        return launch([sys.executable, "-m", "megatoken.cli", *options.words], options.nproc)
    if options.nproc < 1:
        raise Fault(Exit.CONFIG, f"--nproc is {options.nproc}", "--nproc", "give 1 or more")
    if options.nproc not in (1, topology.world_size):
        what = f"--nproc {options.nproc} within a world size of {topology.world_size}"
        raise Fault(Exit.CONFIG, what, "--nproc", "leave it to torchrun or srun, or to --nproc")
    return None


def find_recipe(options: argparse.Namespace) -> tuple[Resolved, list[str], Path | None]:
    """The checked recipe, and of a translated one what differs, as comments, and the run folder it names."""
    given = [name for name in ("recipe", *(flag[2:] for flag in FOREIGN)) if getattr(options, name) is not None]
    if len(given) != 1:
        what = "no recipe given" if not given else f"{' and '.join(given)} are both given"
        raise Fault(Exit.CONFIG, what, "command line", f"give one of RECIPE, {', '.join(FOREIGN)}")
    if options.recipe is not None:
        return resolve(options.recipe, options.overrides), [], None
    from megatoken.interop.foreign import translate

    told = translate(options)
    return told.resolve(options.overrides), [f"# {note}" for note in told.notes], told.out


def run_launch(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """launch: a recipe to a script; the recipe is checked, the batch must divide among the processes."""
    resolved = resolve(options.recipe, options.overrides)
    job = Job(
        name=name_job(resolved.name),
        words=[options.recipe, "--out", str(options.out or Path("runs") / resolved.name), *options.overrides],
        nodes=options.nodes,
        nproc=options.nproc,
        gpus=options.gpus,
        time=options.time,
        image=options.image,
    )
    check_job(job, resolved.run)
    text = ENGINES[options.engine](job)
    if options.write:
        try:
            options.write.write_text(text)
        except OSError as wrong:
            raise Fault(
                Exit.STORAGE, f"cannot write: {wrong.strerror}", str(options.write), "choose another file"
            ) from None
    elif not options.json:
        print(text, end="")
    return Exit.DONE, {"script": text, "processes": job.world_size}


def run_doctor(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """doctor: what this machine has and lacks; fails when a run would."""
    from megatoken.doctor import examine

    findings = examine(options.folder)
    console = Console(to_stderr=options.json)
    for finding in findings:
        mark = {"good": "ok  ", "lacking": "less", "bad": "BAD "}[finding.state]
        console.say(f"{mark} {finding.name:<10} {finding.found}" + (f" — {finding.remedy}" if finding.remedy else ""))
    bad = any(finding.state == "bad" for finding in findings)
    return Exit.CONFIG if bad else Exit.DONE, {"findings": [dataclasses.asdict(finding) for finding in findings]}


def run_config(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """config: the resolved recipe."""
    resolved, notes, _ = find_recipe(options)
    text = "".join(f"{note}\n" for note in notes) + render(resolved.run, resolved.origins)
    if not options.json:
        print(text, end="")
    return Exit.DONE, {"values": dataclasses.asdict(resolved.run), "origins": resolved.origins}


def resolve_either(name: str, overrides: Sequence[str]) -> Run:
    """The run of a preset or a recipe."""
    return resolve_preset(name, overrides) if name in PRESETS else resolve(name, overrides).run


def assume_shape(model: Model) -> Shape:
    """The sizes of a model without data; a vocabulary that is left to the tokenizer is the preset's or GPT-2's."""
    return model.shape(PRESETS[model.preset].vocab_size if model.preset else GPT2_VOCABULARY)


def run_describe(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """describe: arithmetic about a shape."""
    model = resolve_either(options.preset, options.overrides).model
    shape = assume_shape(model)
    assumed = "" if model.vocab_size else f"{'the preset' if model.preset else 'GPT-2'}'s assumed"
    answer = {
        "parameters": count.count_parameters(shape),
        "matmul_parameters": count.count_matmul_parameters(shape),
        "flops_per_token_full": count.flops_per_token(shape, causal=False),
        "flops_per_token_causal": count.flops_per_token(shape, causal=True),
        "state_bytes": count.state_bytes(shape),
        "expected_initial_loss": count.expected_initial_loss(shape),
        **dataclasses.asdict(shape),
    }
    if not options.json:
        _print_shape(options.preset, shape, answer, assumed)
    return Exit.DONE, answer


def run_dryrun(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """dryrun: what one process of many would hold and send."""
    from megatoken.plan.dryrun import dry_run
    from megatoken.plan.fit import describe, find_card_bytes, judge

    knobs = {"machine.tensor_parallel": options.tp, "machine.shard": options.shard}
    given = [f"{key}={value}" for key, value in knobs.items() if value is not None]
    run = resolve_either(options.preset, [*options.overrides, *given])
    card_bytes = find_card_bytes(options.gpu)
    estimate = dry_run(run, assume_shape(run.model), options.gpus, card_bytes)
    fits, said = judge(estimate, run, options.gpu, card_bytes)
    console = Console(to_stderr=options.json)
    console.table([("model", f"{options.preset} on {options.gpus:,} x {options.gpu}"), *describe(estimate)])
    console.say(said)
    return Exit.DONE, {**dataclasses.asdict(estimate), "gpu": options.gpu, "fits": fits, "advice": said}


def _print_shape(name: str, shape: Shape, answer: dict[str, Any], assumed: str) -> None:
    note = f" (the recipe leaves it to the tokenizer: {assumed})" if assumed else ""
    kinds = f"{shape.norm}, {shape.mlp} of {shape.d_ff:,}, {shape.positions} positions, heads of {shape.d_head}"
    kinds += f"{'' if shape.bias else ', no biases'}, output layer {'tied' if shape.tied else 'of its own'}"
    Console().table(
        [
            ("model", f"{name}: {shape.n_layer} layers, {describe_heads(shape)}, width {shape.d_model:,}"),
            ("of", kinds),
            ("context", f"{shape.seq_len:,} tokens"),
            ("vocabulary", f"{shape.vocab_size:,} ids, padded to {shape.padded_vocab_size:,}{note}"),
            ("parameters", f"{answer['parameters']:,}"),
            ("in products", f"{answer['matmul_parameters']:,} (the output layer counted once)"),
            ("FLOPs/token", f"{answer['flops_per_token_full']:,} full attention, "
                            f"{answer['flops_per_token_causal']:,} causal"),
            ("state", f"{answer['state_bytes'] / 2**30:.2f} GiB of fp32 weights and AdamW moments"),
            ("first loss", f"ln(V) = {answer['expected_initial_loss']:.3f} nats"),
        ]
    )  # fmt: skip


def run_sample(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """sample: a prompt continued."""
    from megatoken.writing import write_text

    prompt = sys.stdin.buffer.read() if options.prompt == "-" else options.prompt.encode(errors="surrogateescape")
    return Exit.DONE, write_text(options, prompt.decode(errors="replace"))


def run_eval(options: argparse.Namespace) -> tuple[int, dict[str, Any] | None]:
    """eval: a model's scores, or its loss."""
    check_eval(options)
    if options.tasks and not options.harness:
        find_tasks(options.tasks)
    if (code := launch_ranks(options)) is not None:
        return code, None
    from megatoken.judging import choose_exam, judge

    if not options.harness:
        return Exit.DONE, judge(options, choose_exam(options))
    from megatoken.harness import run_harness

    return Exit.DONE, judge(options, partial(run_harness, options))


def run_export(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """export: a model in another program's form."""
    from megatoken.interop.export import export

    console = Console(to_stderr=options.json)
    return Exit.DONE, export(options.model, options.to, options.out, options.dtype, console)


def run_consolidate(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """consolidate: a checkpoint of many files, in one file a kind."""
    from megatoken.checkpoint.consolidate import consolidate

    console = Console(to_stderr=options.json)
    folder = consolidate(options.source, options.out, console.warn)
    console.say(f"written: {folder}")
    return Exit.DONE, {"folder": str(folder)}


def run_bench(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """bench: one measurement; its JSON line comes last on stdout, asked for or not."""
    from megatoken.bench.program import measure

    answer = measure(options, Console(to_stderr=options.json))
    options.json = True
    return Exit.DONE, answer


def run_verify(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """verify: every hash of a folder."""
    from megatoken.verify import verify_folder

    report = verify_folder(options.folder)
    console = Console(to_stderr=options.json)
    for fault in report.faults:
        console.say(f"damaged: {fault}")
    console.say(f"{report.kind} {options.folder}: {report.checked} checked, {len(report.faults)} damaged")
    answer = {"kind": report.kind, "checked": report.checked, "damaged": [str(fault) for fault in report.faults]}
    return report.faults[0].code if report.faults else Exit.DONE, answer


def run_plot(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """plot: pictures of runs."""
    from megatoken.plot import draw_curves, draw_weights

    first: Path = options.runs[0]
    target = options.out or first / "plots"
    drawn = [draw_curves(options.runs, target / "curves.png" if target.is_dir() or not options.out else target)]
    if options.pictures:
        drawn += draw_weights(first, first / "plots")
    for path in drawn if not options.json else []:
        print(path)
    return Exit.DONE, {"pictures": [str(path) for path in drawn]}


CALLS: dict[str, Call] = {
    "prepare": run_prepare,
    "train": run_train,
    "launch": run_launch,
    "doctor": run_doctor,
    "config": run_config,
    "describe": run_describe,
    "dryrun": run_dryrun,
    "sample": run_sample,
    "eval": run_eval,
    "export": run_export,
    "consolidate": run_consolidate,
    "bench": run_bench,
    "verify": run_verify,
    "plot": run_plot,
}

if __name__ == "__main__":
    sys.exit(main())
