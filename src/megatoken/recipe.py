"""Recipes and overrides to a checked `Run`, with the origin of every value.

In: a recipe (a YAML file, or the name of one that ships with the package) and `section.field=value` words.
Out: `Resolved`: the run and where each value came from. Every mistake is a one-line Fault(CONFIG) with file:line.
Absent: YAML tags, anchors and merges (a recipe is plain text, nothing runs when it is read).
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from megatoken.config import KNOBS, SCIENCE, Run, build, find_conflicts, flatten
from megatoken.errors import Exit, Fault
from megatoken.knobs import Duration, parse_value
from megatoken.presets import PRESETS

VERSION = 1
SHIPPED = Path(__file__).parent / "recipes"
LARGEST_BYTES, DEEPEST = 1 << 20, 20
OPENING = (
    yaml.FlowSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.BlockMappingStartToken,
)
CLOSING = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
# Setting one of these in a later layer replaces what an earlier layer said of the others.
# Compared by what they stand for (dataset fingerprint, sizes), so that a moved folder or a renamed preset may go on.
BY_CONTENT = ("data.path", "model.preset", "model.init")
ALTERNATIVES = ("budget.steps", "budget.tokens", "budget.epochs")


@dataclass(frozen=True, slots=True)
class Assignment:
    """One `key: value` as written, and where."""

    key: str
    text: str
    where: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked run, the name of its recipe, and the origin of each value by dotted key."""

    run: Run
    name: str
    origins: dict[str, str]


def list_recipes() -> list[str]:
    """Names of the recipes that ship with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def resolve(recipe: str, overrides: Sequence[str] = ()) -> Resolved:
    """Read a recipe by file or name, apply `a.b=c` overrides, check everything.

    Raises Fault(CONFIG) naming file:line, the key and the nearest valid one.
    """
    path = _find_recipe(recipe)
    return resolve_assignments(path.stem, read_recipe(path), overrides)


def resolve_assignments(name: str, recipe: Sequence[Assignment], overrides: Sequence[str] = ()) -> Resolved:
    """A recipe that was read already, wherever it came from, with `a.b=c` overrides; everything is checked.

    Raises Fault(CONFIG) naming where a wrong value was written.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in (recipe, [_split_override(word) for word in overrides]):
        _apply(layer, values, origins)
    run = build(values)
    for key, what, fix in find_conflicts(run):
        raise Fault(Exit.CONFIG, f"{key}: {what}", origins.get(key, "default"), fix)
    preset = run.model.preset
    shaped = {f"model.{name}" for name in PRESETS[preset].__slots__} if preset else set()
    for key in KNOBS:
        origins.setdefault(key, f"preset {preset}" if key in shaped else "default")
    return Resolved(run, name, {key: origins[key] for key in KNOBS})


def resolve_preset(name: str, overrides: Sequence[str]) -> Run:
    """One step of a published shape, with `a.b=c` overrides. Raises Fault(CONFIG) like `resolve`."""
    values: dict[str, Any] = {"model.preset": name, "budget.steps": 1}
    origins: dict[str, str] = {}
    _apply([_split_override(word) for word in overrides], values, origins)
    run = build(values)
    for key, what, fix in find_conflicts(run):
        raise Fault(Exit.CONFIG, f"{key}: {what}", origins.get(key, "preset"), fix)
    return run


def _apply(layer: Sequence[Assignment], values: dict[str, Any], origins: dict[str, str]) -> None:
    for key in ALTERNATIVES:
        if any(a.key in ALTERNATIVES for a in layer):
            values.pop(key, None)
            origins.pop(key, None)
    for assignment in layer:
        key, where = assignment.key, assignment.where
        if key not in KNOBS:
            raise Fault(Exit.CONFIG, f"unknown key '{key}'", where, _suggest(key))
        try:
            values[key] = parse_value(KNOBS[key], assignment.text)
        except ValueError as wrong:
            knob = KNOBS[key]
            fix = f"{knob.doc}{f' [{knob.unit}]' if knob.unit else ''}; default {format_value(knob.default)}"
            raise Fault(Exit.CONFIG, f"{key}: {wrong}", where, fix) from None
        origins[key] = where


def _suggest(key: str) -> str:
    """The nearest valid keys: by whole key, else by field name in any section."""
    near = difflib.get_close_matches(key, KNOBS, n=1, cutoff=0.7)
    if not near:
        names = {known.rpartition(".")[2]: known for known in KNOBS}
        near = [names[n] for n in difflib.get_close_matches(key.rpartition(".")[2], names, n=1, cutoff=0.6)]
    if not near:
        near = difflib.get_close_matches(key, KNOBS, n=1, cutoff=0.0)
    return f"did you mean '{near[0]}'?"


def _split_override(word: str) -> Assignment:
    key, equals, text = word.partition("=")
    if not equals:
        raise Fault(Exit.CONFIG, f"cannot read override '{word}'", "command line", "write section.field=value")
    return Assignment(key, text, "command line")


def _find_recipe(recipe: str) -> Path:
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"} or "/" in recipe or path.is_file():
        if not path.is_file():
            raise Fault(Exit.CONFIG, f"no recipe file '{recipe}'", fix=f"ours by name: {', '.join(list_recipes())}")
        return path
    if recipe in list_recipes():
        return SHIPPED / f"{recipe}.yaml"
    near = difflib.get_close_matches(recipe, list_recipes(), n=1, cutoff=0.0)
    fix = f"did you mean '{near[0]}'? known: {', '.join(list_recipes())}, or the path of a .yaml file"
    raise Fault(Exit.CONFIG, f"no recipe named '{recipe}'", fix=fix)


def read_recipe(path: Path) -> list[Assignment]:
    """Every value of a YAML recipe with its file:line.

    Raises Fault(CONFIG) on anything but `key: value` and `section:` with `key: value` below it.
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise Fault(Exit.CONFIG, "recipe is larger than 1 MiB", str(path), "is this the right file?")
        text = path.read_text(encoding="utf-8")
        for token, depth in _measure_depth(yaml.scan(text)):
            if depth > DEEPEST:  # the scanner's time grows with the square of it
                where = f"{path}:{token.start_mark.line + 1}"
                raise Fault(
                    Exit.CONFIG, "a recipe has sections and fields, not deeper", where, "see `megatoken config`"
                )
            if isinstance(token, yaml.AliasToken | yaml.AnchorToken | yaml.TagToken):
                where = f"{path}:{token.start_mark.line + 1}"
                raise Fault(Exit.CONFIG, "YAML tags, anchors and aliases are not read", where, "write the value out")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError, RecursionError) as wrong:
        raise Fault(Exit.CONFIG, f"cannot read recipe: {wrong}", str(path), "check the file") from None
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(wrong, "problem", None) or "unreadable"
        raise Fault(Exit.CONFIG, f"not valid YAML: {reason}", where, "check indentation and quotes") from None
    assignments = list(_walk(root, path, "")) if root else []
    seen: dict[str, str] = {}
    for a in assignments:
        if a.key in seen:
            raise Fault(Exit.CONFIG, f"key '{a.key}' is given twice", a.where, f"first given at {seen[a.key]}")
        seen[a.key] = a.where
    return [a for a in assignments if a.key != "version" or _check_version(a)]


def _measure_depth(tokens: Iterator[yaml.Token]) -> Iterator[tuple[yaml.Token, int]]:
    """Each token, and how many brackets, braces and blocks are open after it."""
    depth = 0
    for token in tokens:
        if isinstance(token, OPENING):
            depth += 1
        elif isinstance(token, CLOSING):
            depth -= 1
        yield token, depth


def _check_version(assignment: Assignment) -> Literal[False]:
    if assignment.text != str(VERSION):
        what = f"recipe is of version {assignment.text}, this megatoken reads version {VERSION}"
        raise Fault(Exit.CONFIG, what, assignment.where, "use the megatoken that wrote it, or adapt the recipe")
    return False


def _walk(node: yaml.Node, path: Path, prefix: str) -> Iterator[Assignment]:
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        inside = f"'{prefix}'" if prefix else "the recipe"
        raise Fault(Exit.CONFIG, f"{inside} is not a section of key: value lines", where, "see `megatoken config`")
    for key_node, value in node.value:
        line = f"{path}:{key_node.start_mark.line + 1}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise Fault(Exit.CONFIG, "a key must be a plain word", line, "write section: then field: value")
        key = f"{prefix}.{key_node.value}" if prefix else key_node.value
        if isinstance(value, yaml.ScalarNode):
            if key in SECTIONS:
                raise Fault(Exit.CONFIG, f"'{key}' is a section, not a value", line, "put its fields below, indented")
            yield Assignment(key, value.value, line)
        elif key in SECTIONS:
            yield from _walk(value, path, key)
        elif key in KNOBS:
            what = f"{key}: expected {KNOBS[key].expects}, got a list or section"
            raise Fault(Exit.CONFIG, what, line, f"default {format_value(KNOBS[key].default)}")
        else:
            near = difflib.get_close_matches(key, SECTIONS, n=1, cutoff=0.0)[0]
            raise Fault(Exit.CONFIG, f"unknown section '{key}'", line, f"did you mean '{near}'?")


SECTIONS = tuple(dict.fromkeys(key.split(".")[0] for key in KNOBS if "." in key))


def format_value(value: Any) -> str:
    """A value as it is written in YAML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "-_./:*" for c in value) and value[-1] != ":"
        return value if plain else json.dumps(value)
    if isinstance(value, Duration):
        return str(value)
    return repr(value)


def render(run: Run, origins: dict[str, str], *, given_only: bool = False) -> str:
    """The resolved run as YAML that can be trained from again, each value followed by its origin.

    given_only: without the values that nobody wrote.
    """
    lines, section = [f"version: {VERSION}"], ""
    for key, value in flatten(run).items():
        if given_only and (origins[key] == "default" or origins[key].startswith("preset ")):
            continue
        head, _, name = key.rpartition(".")
        if head != section:
            section = head
            lines.append(f"{head}:  # {'science' if head in SCIENCE else 'machine'}")
        written = f"{'  ' if head else ''}{name}: {format_value(value)}"
        lines.append(f"{written:<44}  # {origins[key]}")
    return "\n".join(lines) + "\n"


def science_changes(old: Run, new: Run) -> list[str]:
    """`key: old -> new` for every science field that differs: such a run cannot be resumed, only begun anew."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {format_value(before[key])} -> {format_value(after[key])}"
        for key in KNOBS
        if key.split(".")[0] in SCIENCE and key not in BY_CONTENT and before[key] != after[key]
    ]
