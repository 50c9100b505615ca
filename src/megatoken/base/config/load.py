"""Load a recipe, given as a YAML file or the name of a shipped one, and apply overrides to it.

The result is a checked `Config` that records where each value was set. A mistake raises a one-line
ConfigError with file:line. Nothing in a recipe is executed: YAML tags, anchors and merges are
rejected.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatoken.base.config import depth
from megatoken.base.config.fields import Resume, parse_value
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS, suggest_preset
from megatoken.base.config.schema import (
    FIELDS,
    Config,
    build_config,
    flatten,
    is_ignored,
    resume_class,
)
from megatoken.base.config.setting_names import suggest_setting
from megatoken.base.config.validate import validate
from megatoken.base.errors import ConfigError
from megatoken.base.redact import redact
from megatoken.base.rooms import PACKAGE, ask_for_modules, list_entries
from megatoken.base.suggest import suggest
from megatoken.base.system.environment import imported_modules

VERSION = "2"  # of recipes
IMPORTS = "imports"  # key of a run's config: the modules given to --import
SHIPPED = Path(__file__).parent / "recipes"
RUN_CONFIG = "config.yaml"  # of a run folder
LARGEST_BYTES = 1 << 20
NULL = "tag:yaml.org,2002:null"  # the tag of null, ~ and an empty value
COMMAND_LINE = "command line"  # the origin of an override
# Source and options of the `megatoken prepare` command for each dataset of a shipped recipe.
PREPARE = {
    "data/python": "python --tokenizer bpe:4096 --val-fraction 0.05",
    "data/shakespeare": "tinyshakespeare --val-fraction 0.1",
    "data/fineweb": "fineweb",
    "data/fineweb-100bt": "fineweb-100bt",
    "data/fineweb-350bt": "fineweb-350bt",
    "data/fineweb-edu": "fineweb-edu",
}
OPTIMIZER_NUMBERS = ("optim.beta1", "optim.beta2", "optim.eps", "optim.weight_decay")
FOREIGN_RECIPES = Path(__file__).with_name("foreign_recipes.yaml")
# If overrides set one of these, the recipe's values of all of them are dropped.
ALTERNATIVES = ("budget.steps", "budget.tokens", "budget.epochs")
# If overrides set a preset, the recipe's values of these are dropped.
PRESET_FIELDS = tuple(
    f"model.{name}"
    for name in (*ModelConfig().architecture(), "zero_init")
    if name not in ("vocab_size", "value_head")
)


@dataclass(frozen=True)
class Assignment:
    """A setting as written: its dotted key, the text of its value, and where it is (file:line)."""

    key: str
    text: str
    where: str


@dataclass(frozen=True)
class ResolvedConfig:
    """A checked config, with the name of its recipe.

    origins: where each value was set, by dotted key, such as file:line, `command line` or
        `default`.
    notes: lines to print about values computed by the recipe.
    """

    config: Config
    name: str
    origins: dict[str, str]
    notes: tuple[str, ...] = ()


def list_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes, including those of rooms, by name."""
    paths = [*SHIPPED.glob("*.yaml"), *(PACKAGE / file for file in list_entries("recipe").values())]
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}


def prepare_arguments(dataset: str, out: str) -> list[str]:
    """Return the arguments of `megatoken` that prepare a shipped recipe's dataset in `out`.

    dataset: the recipe's data.path.
    """
    source, *options = PREPARE.get(dataset, "SOURCE").split()
    return ["prepare", source, "--out", out, *options]


def load_config(recipe: str | Path, *overrides: str) -> Config:
    """Load a recipe from a file or by name, and apply `section.field=value` overrides.

    Raises ConfigError.
    """
    return resolve(str(recipe), overrides).config


def resolve(recipe: str, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Load a recipe from a file or by name, or the settings of a run folder; apply overrides.

    Raises ConfigError.
    """
    if folder := find_run(recipe):
        return resolve_run(folder, folder / RUN_CONFIG, overrides)
    if match := depth.NAME.fullmatch(recipe):
        derived = list(depth.derive_run(int(match[1])))
        assignments = _read(list_recipes()[depth.RECIPE])
        assignments += [Assignment(key, text, f"{recipe}: {rule}") for key, text, rule in derived]
        resolved = resolve_assignments(recipe, assignments, overrides)
        return replace(
            resolved, notes=tuple(f"{key}={text}: {rule}" for key, text, rule in derived)
        )
    path = _find_recipe(recipe)
    _refuse_foreign(path)
    return resolve_assignments(path.stem, _read(path), overrides)


def _read(path: Path) -> list[Assignment]:
    """Read a recipe. If it is a shipped one, leave out settings of rooms that are not installed."""
    is_shipped = path in list_recipes().values()
    return [each for each in read_recipe(path) if each.key in FIELDS or not is_shipped]


def resolve_run(folder: Path, file: Path, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """Load the settings of a run. Comments in the file tell where each value was set.

    file: the run's config.yaml, or the copy of it in a checkpoint.
    """
    assignments = read_recipe(file)
    lines = file.read_text(encoding="utf-8").splitlines()
    try:
        resolved = resolve_assignments(folder.absolute().name, assignments, overrides)
    except ConfigError as error:
        recorded = [line.partition(": ")[2] for line in lines if line.startswith(f"{IMPORTS}: ")]
        if not (fix := ask_for_modules(re.findall(r"[\w.]+", "".join(recorded)))):
            raise
        raise ConfigError(str(error), fix=fix) from None
    comments = {}
    for number, line in enumerate(lines, 1):
        _, separator, comment = line.rpartition("  # ")
        if separator:
            comments[f"{file}:{number}"] = comment
    origins = {key: comments.get(where, where) for key, where in resolved.origins.items()}
    return replace(resolved, origins=origins)


def resolve_preset(name: str, overrides: Sequence[str]) -> ResolvedConfig:
    """Return the config of a one-step run with a published architecture. Raises ConfigError."""
    preset = Assignment("model.preset", name, "preset")
    steps = Assignment("budget.steps", "1", "preset")
    return resolve_assignments(name, [preset, steps], overrides)


def from_python(config: Config, name: str) -> ResolvedConfig:
    """Check a config that was built in Python. Raises ConfigError."""
    values = flatten(config)
    origins = {
        key: "default" if values[key] == spec.default else "Python" for key, spec in FIELDS.items()
    }
    _refuse_conflicts(config, origins)
    return ResolvedConfig(config, name, origins)


def resolve_assignments(
    name: str, recipe: Sequence[Assignment], overrides: Sequence[str]
) -> ResolvedConfig:
    """Parse and check the settings of a recipe, after replacing some of them by `overrides`.

    Raises ConfigError, which names the file and line, or the option, of a wrong value.

    name: name of the run, also used for its folder in runs/ unless --out is given.
    """
    parts = Path(name).parts
    if not parts or parts[0] == "/" or ".." in parts or not name.isprintable():
        raise ConfigError(
            f"{name!r:.80} cannot name a run", fix="rename the recipe or its run_name"
        )
    settings: dict[str, Assignment] = {}
    for layer in (recipe, [_split_override(text) for text in overrides]):
        keys = {assignment.key for assignment in layer if assignment.text}
        unset = [*ALTERNATIVES] if keys.intersection(ALTERNATIVES) else []
        if "model.preset" in keys:
            unset += PRESET_FIELDS
        for key in unset:
            settings.pop(key, None)
        settings |= {assignment.key: assignment for assignment in layer}
    config = build_config({key: _parse_assignment(item) for key, item in settings.items()})
    preset = config.model.preset
    from_preset = {*PRESET_FIELDS, "model.vocab_size"} if preset else set()
    origins = {key: f"preset {preset}" if key in from_preset else "default" for key in FIELDS}
    origins |= {key: assignment.where for key, assignment in settings.items()}
    _refuse_conflicts(config, origins)
    values = flatten(config)
    for key, spec in FIELDS.items():
        is_chosen = origins[key] == COMMAND_LINE and values[key] != spec.default
        if is_chosen and is_ignored(config, key):
            raise ConfigError(f"{key} only applies if {spec.only_if}", COMMAND_LINE, "leave it out")
    return ResolvedConfig(config, name, origins)


def _refuse_conflicts(config: Config, origins: dict[str, str]) -> None:
    for key, problem, fix in validate(config):
        raise ConfigError(f"{key}: {problem}", origins[key], fix)


def _split_override(override: str) -> Assignment:
    key, equals, text = override.partition("=")
    if not equals:
        fix = "write section.field=value"
        raise ConfigError(f"cannot read override '{override}'", COMMAND_LINE, fix)
    return Assignment(key, text, COMMAND_LINE)


def _parse_assignment(assignment: Assignment) -> Any:
    key, where = assignment.key, assignment.where
    if key not in FIELDS:
        raise ConfigError(f"unknown key '{key:.200}'", where, suggest_setting(key))
    spec = FIELDS[key]
    try:
        return parse_value(spec, assignment.text)
    except ValueError as error:
        unit = f" [{spec.unit}]" if spec.unit else ""
        fix = f"{spec.doc}{unit}; default {format_value(spec.default)}"
        raise ConfigError(f"{key}: {error}", where, fix) from None


def find_run(recipe: str) -> Path | None:
    """Return `recipe` as a path if it is a run folder, else None.

    The name of a shipped recipe is never taken as a folder.
    """
    folder = Path(recipe)
    is_path = bool(recipe) and recipe not in list_recipes()
    return folder if is_path and is_resumable(folder) else None


def list_runs(folder: Path) -> list[str]:
    """Return the paths of the runs in a folder; an empty list if it cannot be read."""
    with suppress(OSError, ValueError):
        return [str(path) for path in sorted(folder.iterdir()) if is_resumable(path)]
    return []


def is_resumable(folder: Path) -> bool:
    """Return whether a folder has the settings or checkpoints of a run."""
    with suppress(OSError):  # such as a name that is too long
        return (folder / RUN_CONFIG).is_file() or (folder / "checkpoints").is_dir()
    return False


def _find_recipe(recipe: str) -> Path:
    with suppress(OSError):
        if Path(recipe).is_file():
            return Path(recipe)
    name = recipe.removesuffix(".yaml")
    recipes = list_recipes()
    if name in recipes:
        return recipes[name]
    if name in PRESETS:
        fix = f"a preset; use it in a recipe: RECIPE model.preset={name}"
        raise ConfigError(f"no recipe named '{recipe}'", fix=fix)
    near = suggest(name, recipes) or suggest_preset(name)
    fix = f"did you mean '{near}'? " if near else ""
    fix += f"give a .yaml file, a run folder or one of {', '.join(recipes)}, depth-N"
    raise ConfigError(f"no recipe named '{recipe}'", fix=fix)


def _refuse_foreign(path: Path) -> None:
    """Raise ConfigError if `path` is a recipe of another program."""
    foreign: dict[str, list[str]] = yaml.safe_load(FOREIGN_RECIPES.read_text(encoding="utf-8"))
    root = None if path.suffix in foreign else compose_yaml(path)
    keys = root.value if isinstance(root, yaml.MappingNode) else ()
    for name in (path.suffix, *(str(key.value) for key, _ in keys)):
        if name in foreign:
            what, fix = foreign[name]
            raise ConfigError(what, path, fix.replace("FILE", str(path)))


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects tags, anchors and aliases, which can run code or fill memory."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None) or getattr(event, "tag", None):
            problem = "tags, anchors and aliases are not read"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def compose_yaml(path: Path) -> yaml.Node | None:
    """Return the root node of a YAML file, or None for an empty one.

    Raises ConfigError, with file:line, for invalid YAML, tags, anchors, aliases, and files above
    1 MiB.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
        if len(text) > LARGEST_BYTES:
            raise ConfigError("recipe is larger than 1 MiB", path, "is this the right file?")
        return yaml.compose(text.decode(), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe: {error}", path, "check the file") from None
    except RecursionError:
        raise ConfigError("recipe is nested too deeply", path, "check the file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "unreadable"
        where = f"{path}:{mark.line + 1}" if mark else path
        fix = "check indentation and quotes"
        raise ConfigError(f"not valid YAML: {problem}", where, fix) from None


def read_recipe(path: Path) -> list[Assignment]:
    """Return every setting in a YAML recipe with its file:line, except those whose value is null.

    Raises ConfigError if the file holds anything but `key: value` and `section:` with indented
    `key: value` lines.
    """
    root = compose_yaml(path)
    assignments: dict[str, Assignment] = {}
    for assignment in _list_assignments(root, f"{path}:1", path) if root else ():
        key, where = assignment.key, assignment.where
        if key in assignments:
            first = assignments[key].where
            raise ConfigError(f"key '{key}' is given twice", where, f"first given at {first}")
        assignments[key] = assignment
    assignments.pop(IMPORTS, None)
    version = assignments.pop("version", None)
    if version and version.text != VERSION:
        problem = f"recipe of version {version.text}, not {VERSION}"
        raise ConfigError(problem, version.where, "use the megatoken that wrote it")
    return list(assignments.values())


def _list_assignments(
    node: yaml.Node, where: str, path: Path, prefix: str = ""
) -> Iterator[Assignment]:
    is_mapping = isinstance(node, yaml.MappingNode)
    if not is_mapping or not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
        name = prefix.removesuffix(".") or "the recipe"
        problem = f"{name} is neither a value nor a section of field: value lines"
        raise ConfigError(problem, where, "see `megatoken config`")
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        where = f"{path}:{key.start_mark.line + 1}"
        if value.tag == NULL:
            continue
        if isinstance(value, yaml.ScalarNode):
            yield Assignment(name, value.value, where)
        else:
            yield from _list_assignments(value, where, path, f"{name}.")


def format_value(value: Any) -> str:
    """Format the value of a setting as YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    # A leading `-` or `*` has a meaning in YAML.
    if re.fullmatch(r"(?!null$)[\w./][\w./:*-]*(?<!:)", value, re.IGNORECASE):
        return value
    quoted: str = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf)
    return quoted.rstrip("\n")


def render(config: Config, origins: dict[str, str], *, given_only: bool = False) -> str:
    """Format a config as a YAML recipe, with the origin of each value as a comment.

    given_only: whether to leave out default values and those of a preset.
    """
    lines = [f"version: {VERSION}"]
    if modules := ",".join(imported_modules()):
        lines.append(f"{IMPORTS}: {format_value(modules)}")
    section = ""
    for key, value in flatten(config).items():
        origin = origins[key]
        if given_only and (origin == "default" or origin.startswith("preset ")):
            continue
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines.append(f"{head}:")
        line = f"{'  ' if head else ''}{name}: {format_value(value)}"
        lines.append(f"{line:<44}  # {origin if origin.isprintable() else ascii(origin)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Change:
    """A setting that a resume would change: old and new value, and whether that is allowed."""

    key: str
    old: str
    new: str
    resume: Resume

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def list_changes(old: Config, new: Config) -> list[Change]:
    """Return the settings that a resume with the config `new` would change.

    `new` need not repeat model.init, or the model sizes that are read from it. If they are unset in
    `new`, they do not count as changes.
    """
    old_values = flatten(old)
    new_values = flatten(new)
    new_values["model.init"] = new_values["model.init"] or old_values["model.init"]
    default = ModelConfig().architecture()
    sizes = new.model.architecture()
    free = ("seq_len", "value_head")
    if new.model.init and all(sizes[name] == default[name] for name in sizes if name not in free):
        unread = [f"model.{name}" for name in sizes if sizes[name] == default[name]]
        new_values |= {key: old_values[key] for key in unread if key in old_values}
    changes = []
    for key in FIELDS:
        # Secrets are not saved in a run folder, so compare redacted values.
        before = redact(format_value(old_values[key]))
        after = redact(format_value(new_values[key]))
        if before != after:
            resume = _resume_class(key, old_values, new_values)
            changes.append(Change(key, before, after, resume))
    return changes


def _resume_class(key: str, old: dict[str, Any], new: dict[str, Any]) -> Resume:
    if key in OPTIMIZER_NUMBERS and FIELDS["optim.name"].find_own(new["optim.name"]):
        return "fatal"  # they come from the checkpoint
    if key == "data.path":
        return "free"  # a dataset may move; its fingerprint is compared later
    if FIELDS[key].find_own(old[key]) or FIELDS[key].find_own(new[key]):
        return "guarded" if resume_class(key) == "free" else resume_class(key)
    return resume_class(key)
