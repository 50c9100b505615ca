"""Loads a recipe (a YAML file, or the name of one that ships with the package) and `section.field=value` overrides.

The result is a checked `Config` with the origin of every value. Every mistake is a one-line ConfigError with
file:line. YAML tags, anchors and merges are refused: nothing in a recipe is executed.
"""

import math
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatoken.config.depth import NAME as DEPTH
from megatoken.config.depth import RECIPE as DEPTH_RECIPE
from megatoken.config.depth import derive_run
from megatoken.config.effects import list_without_effect
from megatoken.config.fields import parse_value
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import (
    ALIASES,
    FIELDS,
    Config,
    Resume,
    build_config,
    flatten,
    resume_class,
    validate,
)
from megatoken.config.words import (
    MAIN_FIELDS,
    TEXTS,
    WEIGHTS,
    find_value,
    nearest,
    suggest_key,
    suggest_recipe,
    suggest_value,
)
from megatoken.errors import ConfigError
from megatoken.redact import redact

VERSION = 2  # in version 1 optim.decay had a meaning under wsd and wsd-sqrt only, and every run folder gives it
SHIPPED = Path(__file__).parent / "recipes"
RUN_CONFIG = "config.yaml"  # of a run folder
LARGEST_BYTES = 1 << 20
NULL = "tag:yaml.org,2002:null"  # the tag of null, ~ and an empty value
COMMAND_LINE = "command line"  # the origin of an override
# The datasets that shipped recipes name: source and options of the `megatoken prepare` command that makes each.
PREPARE = {
    "data/python": "python --tokenizer bpe:4096 --val-fraction 0.05",
    "data/shakespeare": "tinyshakespeare --val-fraction 0.1",
    **{
        f"data/{name}": name
        for name in ("fineweb", "fineweb-100bt", "fineweb-350bt", "fineweb-edu")
    },
}
OPTIMIZER_NUMBERS = ("optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay")
# Setting one of these in a later layer unsets the others.
ALTERNATIVES = ("budget.steps", "budget.tokens", "budget.epochs")
# A preset in a later layer unsets these. The vocabulary goes with the data.
PRESET_FIELDS = tuple(
    f"model.{name}"
    for name in (*ModelConfig().architecture(), "zero_init")
    if name not in ("vocab_size", "value_head")
)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `key: value` as written, and where."""

    key: str
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A checked config, the name of its recipe, and the origin of each value by dotted key."""

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...] = ()


def list_recipes() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def prepare_words(dataset: str, out: str) -> list[str]:
    """The words behind `megatoken` that make `dataset`, the data.path of a shipped recipe, in `out`."""
    source, *options = PREPARE.get(dataset, "SOURCE").split()
    return ["prepare", source, "--out", out, *options]


def resolve(
    recipe: str, overrides: Sequence[str] = (), others: Sequence[str] = ()
) -> ResolvedConfig:
    """Read a recipe by file or name, or the settings of a run by its folder, apply `a.b=c` overrides, check everything.

    others: names that the command knows beside recipes, for a suggestion. Raises ConfigError naming file:line, the key
    and the nearest valid one.
    """
    if folder := find_run(recipe):
        return resolve_run(folder, folder / RUN_CONFIG, overrides)
    if match := DEPTH.fullmatch(recipe):
        derived = list(derive_run(int(match[1])))
        own = [Assignment(key, value, f"{recipe}: {rule}") for key, value, rule in derived]
        base = read_recipe(SHIPPED / f"{DEPTH_RECIPE}.yaml")
        resolved = resolve_assignments(recipe, [*base, *own], overrides)
        return replace(
            resolved,
            notes=(*(f"{key}={value}: {rule}" for key, value, rule in derived), *resolved.notes),
        )
    path = _find_recipe(recipe, others)
    assignments = read_recipe(path)
    # What `config` and a run folder write holds every value.
    is_own = path.parent != SHIPPED and not {
        assignment.key for assignment in assignments
    }.issuperset(ALTERNATIVES)
    return resolve_assignments(path.stem, assignments, overrides, is_own=is_own)


def find_run(recipe: str) -> Path | None:
    """The run folder that a recipe's argument names, None where it names something else.

    Raises ConfigError where a run folder and a recipe have that name.
    """
    folder = Path(recipe)
    with suppress(OSError, ValueError):  # no path, as _find_recipe says
        if recipe and ((folder / RUN_CONFIG).is_file() or (folder / "checkpoints").is_dir()):
            if recipe in list_recipes():
                fix = f"write ./{recipe} for the folder, {recipe}.yaml for the recipe"
                raise ConfigError(
                    f"'{recipe}' is both a run folder and a recipe", "command line", fix
                )
            return folder
    return None


def resolve_run(folder: Path, file: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """The settings of a run from `file`, its config.yaml or a checkpoint's copy, with the origins that stand there."""
    resolved = resolve_assignments(folder.absolute().name, read_recipe(file), overrides)
    lines = file.read_text(encoding="utf-8").splitlines()
    noted = {
        f"{file}:{number}": line.rpartition("  # ")[2]
        for number, line in enumerate(lines, 1)
        if "  # " in line
    }
    return replace(
        resolved, origins={key: noted.get(where, where) for key, where in resolved.origins.items()}
    )


def list_runs(folder: Path) -> list[str]:
    """Paths of the runs in a folder; none where it cannot be read."""
    with suppress(OSError, ValueError):  # no folder, or no path at all
        paths = sorted(folder.iterdir())
        return [
            str(path)
            for path in paths
            if (path / RUN_CONFIG).is_file() or (path / "checkpoints").is_dir()
        ]
    return []


def load_config(recipe: str | Path, *overrides: str) -> Config:
    """The config of a recipe, by file or name, with `section.field=value` overrides. Raises ConfigError."""
    resolved = resolve(str(recipe), overrides)
    for note in (
        () if DEPTH.fullmatch(str(recipe)) else resolved.notes
    ):  # those of a depth warn of nothing
        warnings.warn(note, stacklevel=2)
    return resolved.config


def resolve_assignments(
    name: str, recipe: Sequence[Assignment], overrides: Sequence[str] = (), *, is_own: bool = False
) -> ResolvedConfig:
    """Check assignments that were read already. Raises ConfigError naming where a wrong value was written.

    name: of the run, and of its folder in runs/ unless --out is given. is_own: the recipe holds what its user chose, of
    which nothing may be without effect; of the overrides nothing may be either way.
    """
    if (
        not Path(name).parts
        or Path(name).is_absolute()
        or ".." in Path(name).parts
        or not name.isprintable()
    ):
        raise ConfigError(
            f"a run cannot be called {name!r:.80}", fix="rename the recipe, or its run_name"
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notes = _apply(recipe, values, origins)
    preset_of_recipe = values.get("model.preset", "")
    notes += _apply([_split_override(word) for word in overrides], values, origins)
    config = build_config(values)
    notes += _note_other_preset(preset_of_recipe, config, origins)
    _refuse_conflicts(config, origins)
    layers = dict.fromkeys(origins if is_own else (), 1)
    layers |= {key: 2 for key, origin in origins.items() if overrides and origin == COMMAND_LINE}
    for key, cause, why in list_without_effect(config, layers):
        what = f"{key} has no effect beside {cause}={format_value(flatten(config)[cause])}: {why}"
        raise ConfigError(what, origins[key], f"leave it out, or change {cause}")
    preset = config.model.preset
    given = {*PRESET_FIELDS, "model.vocab_size"} if preset else set()
    defaults = {key: f"preset {preset}" if key in given else "default" for key in FIELDS}
    return ResolvedConfig(config, name, defaults | origins, tuple(dict.fromkeys(notes)))


def _note_other_preset(preset_of_recipe: str, config: Config, origins: dict[str, str]) -> list[str]:
    """A note where the command line takes another preset, and leaves the rate that was chosen for the recipe's."""
    preset, rate = config.model.preset, origins.get("optim.lr", "")
    if preset_of_recipe in ("", preset) or preset not in list_recipes() or rate == COMMAND_LINE:
        return []
    rest = f"optim.lr {config.optim.lr:g} and budget.batch_tokens {config.budget.batch_tokens} stay {preset_of_recipe}'s"
    return [f"{rest}: the recipe {preset} has its own"]


def resolve_preset(name: str, overrides: Sequence[str]) -> ResolvedConfig:
    """One step of a published architecture, with `a.b=c` overrides. Raises ConfigError like `resolve`."""
    one_step = [
        Assignment("model.preset", name, "preset"),
        Assignment("budget.steps", "1", "preset"),
    ]
    return resolve_assignments(name, [*one_step, *map(_split_override, overrides)])


def from_python(config: Config, name: str) -> ResolvedConfig:
    """A config that was built in Python, checked. Raises ConfigError."""
    values = flatten(config)
    origins = {
        key: "default" if values[key] == spec.default else "Python" for key, spec in FIELDS.items()
    }
    _refuse_conflicts(config, origins)
    return ResolvedConfig(config, name, origins)


def _refuse_conflicts(config: Config, origins: dict[str, str]) -> None:
    for key, what, fix in validate(config):
        raise ConfigError(f"{key}: {what}", origins.get(key, "default"), fix)


def _apply(
    layer: Sequence[Assignment], values: dict[str, Any], origins: dict[str, str]
) -> list[str]:
    """Parse and set the assignments; return a note for each that uses an old name."""
    notes = []
    given = {assignment.key for assignment in layer if assignment.text}
    unset = ALTERNATIVES if given.intersection(ALTERNATIVES) else ()
    for key in (*unset, *(PRESET_FIELDS if "model.preset" in given else ())):
        values.pop(key, None)
        origins.pop(key, None)
    unknown: list[Assignment] = []
    for assignment in layer:
        key, text, where = assignment.key, assignment.text, assignment.where
        if key in ALIASES:
            key = ALIASES[key]
            text = (FIELDS[key].alias_values or {}).get(text, text)
            notes.append(
                f"{assignment.key} is now called {key}"
                + (f"={text}" if text != assignment.text else "")
            )
        if any(known.startswith(f"{key}.") for known in FIELDS):
            fix = "write `field: value` lines below it"
            if where == COMMAND_LINE and (main := MAIN_FIELDS.get(key)):
                fix = f"did you mean {main}={find_value(FIELDS[main], text) or text:.80}?"
            raise ConfigError(f"{key} is a section, got {text!r:.80}", where, fix)
        if key not in FIELDS:
            unknown.append(assignment)
            continue
        spec = FIELDS[key]
        try:
            values[key] = parse_value(spec, text)
        except ValueError as wrong:
            what_it_is = f"{spec.doc}{f' [{spec.unit}]' if spec.unit else ''}; default {format_value(spec.default)}"
            fix = f"{suggest_value(spec, text)} {what_it_is}"
            raise ConfigError(f"{key}: {wrong}", where, fix) from None
        origins[key] = where
    if unknown:
        keys = ", ".join(f"'{each.key:.200}'" for each in unknown)
        places, fixes = (
            dict.fromkeys(each.where for each in unknown),
            dict.fromkeys(suggest_key(e.key, e.text) for e in unknown),
        )
        raise ConfigError(
            f"unknown key{'s' * (len(unknown) > 1)} {keys}", ", ".join(places), " ".join(fixes)
        )
    return notes


def _split_override(word: str) -> Assignment:
    key, equals, text = word.partition("=")
    if not equals:
        raise ConfigError(
            f"cannot read override '{word}'", COMMAND_LINE, "write section.field=value"
        )
    return Assignment(key, text, COMMAND_LINE)


def _find_recipe(recipe: str, others: Sequence[str]) -> Path:
    known = list_recipes()
    try:
        if Path(recipe).is_file() and Path(recipe).suffix not in (*TEXTS, *WEIGHTS):
            return Path(recipe)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ConfigError(
            f"cannot read recipe: {error.strerror}", recipe, "check the path"
        ) from None
    if recipe.removesuffix(".yaml") in known:
        return SHIPPED / f"{recipe.removesuffix('.yaml')}.yaml"
    is_path = "/" in recipe or recipe.endswith((".yaml", ".yml"))
    if recipe and (runs := list_runs(Path(recipe))):
        raise ConfigError(f"'{recipe}' is a folder of runs", fix=f"name one: {', '.join(runs[:5])}")
    if recipe and Path(recipe).is_dir():
        what = f"'{recipe}' is a folder without a run"
        as_data, as_text = shlex.join([f"data.path={recipe}"]), shlex.quote(recipe)
        fix = f"if it is a dataset: megatoken train RECIPE {as_data}; if text: megatoken quickstart --data {as_text}"
        raise ConfigError(what, fix=fix)
    what = f"no recipe named '{recipe}'{', and no such file or run folder' if is_path else ''}"
    what = f"'{recipe}' is no recipe" if Path(recipe).is_file() else what
    names = [*dict.fromkeys([*known, "depth-N", *others])]
    fix = f"{suggest_recipe(recipe, names)}, or the path of a .yaml file or a run"
    beside = {Path(run).name: run for run in list_runs(Path(recipe).parent)} if is_path else {}
    if near := nearest(Path(recipe).name, beside):
        fix = f"did you mean {beside[near]}?"
    raise ConfigError(what, fix=fix)


class _Loader(yaml.SafeLoader):
    """Refuses tags, anchors and aliases: a few lines of them can run code or expand to gigabytes."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(
                problem="tags, anchors and aliases are not read", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


def compose_yaml(path: Path) -> yaml.Node | None:
    """The root node of a YAML file; None for an empty one.

    Raises ConfigError naming file:line for what is not YAML, larger than 1 MiB, or has tags, anchors or aliases.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
        if len(text) > LARGEST_BYTES:
            raise ConfigError("recipe is larger than 1 MiB", path, "is this the right file?")
        return yaml.compose(text.decode(), Loader=_Loader)
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ConfigError(f"cannot read recipe: {reason}", path, "check the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or "unreadable"
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(
            f"not valid YAML: {reason}", where, "check indentation and quotes"
        ) from None


def read_recipe(path: Path) -> list[Assignment]:
    """Every value of a YAML recipe with its file:line; a null is no value.

    Raises ConfigError on anything but `key: value` and `section:` with `key: value` below it.
    """
    root = compose_yaml(path)
    seen: dict[str, Assignment] = {}
    for assignment in _walk(root, f"{path}:1", path) if root else ():
        key = ALIASES.get(assignment.key, assignment.key)
        if key in seen:
            raise ConfigError(
                f"key '{key}' is given twice", assignment.where, f"first given at {seen[key].where}"
            )
        seen[key] = assignment
    version = seen.pop("version", None)
    if version and version.text not in ("1", str(VERSION)):
        what = f"recipe is of version {version.text}, this megatoken reads versions 1 and {VERSION}"
        raise ConfigError(
            what, version.where, "use the megatoken that wrote it, or adapt the recipe"
        )
    if version and version.text == "1" and (decay := seen.get("optim.decay")):
        schedule = seen.get("optim.schedule")
        if not (schedule and schedule.text.startswith("wsd")):
            seen["optim.decay"] = replace(decay, text="auto")
    return list(seen.values())


def _walk(node: yaml.Node, where: str, path: Path, prefix: str = "") -> Iterator[Assignment]:
    if not isinstance(node, yaml.MappingNode) or not all(
        isinstance(key, yaml.ScalarNode) for key, _ in node.value
    ):
        what = f"{prefix.removesuffix('.') or 'the recipe'} is neither a value nor a section of field: value lines"
        raise ConfigError(what, where, "see `megatoken config`")
    for key, value in node.value:
        name, where = f"{prefix}{key.value}", f"{path}:{key.start_mark.line + 1}"
        if value.tag == NULL:
            continue
        if isinstance(value, yaml.ScalarNode):
            yield Assignment(name, value.value, where)
        else:
            yield from _walk(value, where, path, f"{name}.")


def format_value(value: Any) -> str:
    """A value as it is written in YAML."""
    if isinstance(value, str):
        # `-` and `*` mean something else in front
        plain = re.fullmatch(r"(?!null$)[\w./][\w./:*-]*(?<!:)", value, re.IGNORECASE)
        quoted: str = yaml.safe_dump(
            value, default_style='"', allow_unicode=True, width=math.inf
        ).rstrip("\n")
        return value if plain else quoted
    return str(value).lower() if isinstance(value, bool) else str(value)


def render(config: Config, origins: dict[str, str], *, given_only: bool = False) -> str:
    """The resolved config as YAML that can be trained from again, each value followed by its origin.

    given_only: without defaults and preset values.
    """
    lines, section = [f"version: {VERSION}"], ""
    for key, value in flatten(config).items():
        if given_only and (origins[key] == "default" or origins[key].startswith("preset ")):
            continue
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines.append(f"{head}:")
        written = f"{'  ' if head else ''}{name}: {format_value(value)}"
        origin = origins[key]
        lines.append(f"{written:<44}  # {origin if origin.isprintable() else ascii(origin)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that differs between two starts of a run, and whether a resume may change it."""

    key: str
    old: str
    new: str
    resume: Resume

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def list_changes(old: Config, new: Config) -> list[Change]:
    """Every setting that differs, as a resume judges it.

    It may leave out model.init, which it does not read. A free setting is guarded where one of its values was
    registered from Python: it may compute something else. The numbers of an optimizer registered from Python come from
    its checkpoint.
    """
    before, after = flatten(old), flatten(new)
    after["model.init"] = after["model.init"] or before["model.init"]
    default, given = ModelConfig().architecture(), new.model.architecture()
    free = ("seq_len", "value_head")
    if new.model.init and all(given[name] == default[name] for name in given if name not in free):
        sizes = [
            f"model.{name}" for name in given if given[name] == default[name]
        ]  # still to be taken from model.init
        after |= {key: before[key] for key in sizes if key in before}
    before["optim.decay"], after["optim.decay"] = (
        old.optim.decay_length or "auto",
        new.optim.decay_length or "auto",
    )
    changes = []
    for key, spec in FIELDS.items():
        # A folder may move: the dataset in it is compared by its fingerprint (train/restore.py).
        resume: Resume = "free" if key == "data.path" else resume_class(key)
        if resume == "free" and (spec.is_registered(before[key]) or spec.is_registered(after[key])):
            resume = "guarded"
        if key in OPTIMIZER_NUMBERS and FIELDS["optim.name"].is_registered(new.optim.name):
            resume = "fatal"
        was, is_now = (
            redact(format_value(values[key])) for values in (before, after)
        )  # a run folder holds no secret
        if was != is_now:
            changes.append(Change(key, was, is_now, resume))
    return changes
