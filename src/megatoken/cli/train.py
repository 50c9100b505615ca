"""`megatoken train RECIPE`: train a recipe, or resume a run."""

import signal
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megatoken.base.config.fields import ConfigField, Duration, parse_value
from megatoken.base.config.load import format_value
from megatoken.base.config.schema import FIELDS, resume_class
from megatoken.base.console import Console
from megatoken.base.errors import ExitCode
from megatoken.base.rooms import list_entries
from megatoken.base.system.environment import heartbeat_file
from megatoken.base.system.process import at_parent_death
from megatoken.cli import Result
from megatoken.cli.arguments import add_options
from megatoken.cli.ranks import launch_ranks
from megatoken.cli.recipe import (
    add_recipe_arguments,
    apply_options,
    check_init,
    find_recipe,
    render_with_notes,
)
from megatoken.distributed.env import read_dist_env
from megatoken.distributed.local_launch import RESTARTS
from megatoken.distributed.signals import stop_at_once, write_stop_marker
from megatoken.store.run_folder import find_changes

HELP = "train a recipe, or resume a run"
EXAMPLE = "megatoken train gpt2-124m --out runs/mine data.path=data/mine optim.lr=1e-3"


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser)
    add_options(parser, __file__, length=_length, restarts=RESTARTS, hidden=SUPPRESS)
    parser.epilog = f"{parser.epilog}\n\n{describe_fields()}"


def run(options: Namespace, console: Console) -> Result:
    order = "one-batch" if options.overfit_batch else None
    given = {name: getattr(options, name) for name in list_entries("option")}
    apply_options(
        options,
        {
            "--init": ("model.init", options.init),
            "--overfit-batch": ("data.order", order),
            "--profile": ("log.profile", options.profile),
            **{f"--{name}": (f"objective.{name}", value) for name, value in given.items()},
        },
    )
    with stop_at_once(options.ending):
        resolved, named_out = find_recipe(options)
        watch_parent(options.ending)
        out = options.out or named_out or Path("runs") / resolved.name
        check_init(options.recipe, resolved.config, out)
        dist_env = read_dist_env()
        if dist_env.world_size == 1:  # before torch is loaded and ranks are started
            find_changes(out, resolved, allow_changes=options.allow_changes)
        code = launch_ranks(options, options.restarts, resolved.config)
        if code is not None:
            return Result(convert_stop(code, options.ending), None)
        if dist_env.is_main_process and options.recipe:
            for note in resolved.notes:
                console.print(f"note: {note}")
        elif dist_env.is_main_process:
            console.print(render_with_notes(resolved, given_only=True))
        if options.extend:
            from megatoken.cli.extend import extend_run
            from megatoken.distributed.comm import join_process_group

            arguments = resolved, out, options.extend, console
            extend = partial(extend_run, *arguments, allow_changes=options.allow_changes)
            with join_process_group(dist_env, "cpu") as comm:
                resolved = comm.run_on_rank0(extend)
        from megatoken.train.train import Trainer

        summary = Trainer(
            resolved,
            out,
            console=console,
            explain=options.explain,
            allow_changes=options.allow_changes,
            **given,
        ).fit()
        data = asdict(summary) if dist_env.is_main_process else None
        return Result(convert_stop(summary.code, options.ending), data)


def watch_parent(ending: Path | None) -> None:
    """Ask Linux to send this process a SIGTERM when torchrun, its parent, dies.

    Does nothing if torchrun is not the parent.

    ending: value of --ending; None without torchrun.
    """
    request = at_parent_death(signal.SIGTERM)
    if ending and heartbeat_file() is None and request:
        request()


def convert_stop(code: int, ending: Path | None) -> int:
    """Return the exit code `code`, except that STOPPED becomes 0 under torchrun.

    torchrun would count STOPPED as a failure, so it is written to the file `ending` instead.
    """
    return write_stop_marker(ending) if code == ExitCode.STOPPED else code


def _length(text: str) -> Duration:
    """Parse a positive duration."""
    spec = ConfigField(Duration(0), "", open_low=True, type=Duration)
    try:
        length = parse_value(spec, text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    assert isinstance(length, Duration)
    return length


def describe_fields() -> str:
    """Return a description of all settings, with a line for each, by section.

    A line holds the default, whether a resume may change it, the meaning, the unit and the choices.
    """
    lines = ["settings (section.field=value); on resume free ones may change:"]
    section = ""
    for key, spec in FIELDS.items():
        head = key.rpartition(".")[0]
        if head and head != section:
            section = head
            lines.append(f"\n {section}")
        doc = f"{spec.doc} [{spec.unit}]" if spec.unit else spec.doc
        if spec.expects.startswith("one of"):
            doc += f" {{{spec.expects.removeprefix('one of ')}}}"
        default = f"{key}={format_value(spec.default)}"
        lines.append(f"  {default:<28} {resume_class(key):<7} {doc}")
    return "\n".join(lines)
