"""`megatoken report RUN...`: write runs as one HTML page, or serve a page that follows them."""

from argparse import ArgumentParser, Namespace

from megatoken.base.console import Console, format_memory
from megatoken.base.errors import import_extra
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.metrics_log import METRICS
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.cli.runs import DEFAULT
from megatoken.store.run_state import find_runs

HELP = "write runs as one offline HTML page: curves, samples, scores, cost"
EXAMPLE = "megatoken report runs/mine runs/other --out report.html"


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, runs=[DEFAULT])


def run(options: Namespace, console: Console) -> Data:
    from megatoken.study.report_page import build_page

    if options.serve:
        quiet = Console(quiet=True)  # each request reads the runs again

        def build(hidden: list[str] | None) -> str:
            found = [run for path in options.runs for run in find_runs(path)]
            runs = [run for run in found if (run / METRICS).exists()]
            return build_page(runs, options.price, options.ladder, quiet.warn, hidden, is_live=True)

        import_extra("megatoken.study.live_page", "serve").serve(build, options, console)
        return {"served": True}
    # A path without runs is kept, because the error names it.
    runs = [run for path in options.runs for run in [*find_runs(path)] or [path]]
    page = build_page(runs, options.price, options.ladder, console.warn).encode()
    with storage_errors(options.out, what="cannot write the report", fix="choose --out"):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(options.out, page)
    console.print(f"report: {options.out} ({format_memory(len(page))})")
    return {"report": str(options.out), "bytes": len(page)}
