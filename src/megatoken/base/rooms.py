"""Find what rooms add to the core. The core itself names no other room.

A room is a package of megatoken with a module `room`, or a single module. Training needs the rooms
in CORE; any other room can be deleted, together with what it adds. ENTRIES in a room says what it
adds: for each kind of entry ("command", ...), a dict from names to references, `module` or
`module:attribute`. References are imported when they are used. NEEDS lists the rooms outside the
core that a room imports; if one of them is missing, the room is ignored. Both are literals, which
are read without importing the module.

Users add entries in two ways: `--import MODULE` reads the ENTRIES of a module of theirs, also in the
processes that the command starts, and `register` adds an entry to this process only.
"""

import ast
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from megatoken.base.errors import ConfigError
from megatoken.base.suggest import suggest
from megatoken.base.system.environment import imported_modules

CORE = ("base", "data", "model", "optim", "distributed", "store", "train")
PACKAGE = Path(__file__).parents[1]
REGISTERED: dict[str, dict[str, Any]] = {}  # by kind and name


class Room(NamedTuple):
    """What a room needs and adds."""

    needs: tuple[str, ...]
    entries: dict[str, Mapping[str, str]]


@cache
def find_rooms() -> dict[str, Room]:
    """Return the rooms that add something, by name, except those that need a missing room."""
    paths = {path.parent.name: path for path in sorted(PACKAGE.glob("*/room.py"))}
    paths |= {path.stem: path for path in sorted(PACKAGE.glob("[!_]*.py"))}
    found = {name: _read(path) for name, path in paths.items()}
    while lacking := [name for name, room in found.items() if {*room.needs} - found.keys()]:
        for name in lacking:
            del found[name]
    return found


def _read(path: Path) -> Room:
    values: dict[str, Any] = {"NEEDS": (), "ENTRIES": {}}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and (name := ast.unparse(node.targets[0])) in values:
            values[name] = ast.literal_eval(node.value)
    return Room(values["NEEDS"], values["ENTRIES"])


@cache
def _read_imported(modules: tuple[str, ...]) -> list[Room]:
    """Read the ENTRIES of users' modules. Raises ConfigError."""
    if modules and (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # last, so that its files cannot replace installed modules
    rooms = []
    for module in modules:
        try:
            spec = None if module.startswith(".") else find_spec(module)
        except ModuleNotFoundError:  # `module.py` asks for a module in a package
            spec = None
        if spec is None or spec.origin is None:
            fix = "give the name of a module in this folder or an installed one, without .py"
            raise ConfigError(f"no module '{module}'", "--import", fix)
        try:
            rooms.append(_read(Path(spec.origin)))
        except (SyntaxError, ValueError) as error:
            fix = "write ENTRIES = {kind: {name: 'module:attribute'}}, without computing anything"
            raise ConfigError(f"cannot read ENTRIES: {error}", spec.origin, fix) from None
        for kind, names in rooms[-1].entries.items():
            _check_kind(kind, names, spec.origin)
    return rooms


def _check_kind(kind: str, names: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if rooms have no entries of this kind, or one of these names."""
    rooms = find_rooms().values()
    kinds = {each for room in rooms for each in room.entries}
    if kind not in kinds:
        match = suggest(kind, kinds)
        fix = f"did you mean {match}?" if match else f"kinds: {', '.join(sorted(kinds))}"
        raise ConfigError(f"no entries of the kind '{kind}'", where, fix)
    for room in rooms:
        for name in room.entries.get(kind, {}).keys() & names.keys():
            raise ConfigError(f"{kind} '{name}' exists", where, "choose another name")


def register(kind: str, name: str, value: Any) -> None:
    """Add an entry to this process only: what a reference in ENTRIES would import.

    Raises ConfigError for an unknown kind, or a name that a room of the package has.
    """
    _check_kind(kind, {name: value}, "register")
    REGISTERED.setdefault(kind, {})[name] = value


def ask_for_modules(names: Iterable[str]) -> str:
    """Return how to import those of the users' modules that are not imported; "" if all are."""
    lacking = ",".join(sorted(set(names) - {"", *imported_modules()}))
    return f"add --import {lacking}" if lacking else ""


def list_own(kind: str) -> Mapping[str, Any]:
    """Return the users' entries of a kind by name: references, or registered objects."""
    return {**_merge(_read_imported(imported_modules()), kind), **REGISTERED.get(kind, {})}


def list_entries(kind: str) -> Mapping[str, Any]:
    """Return the references of the entries of a kind, or registered objects, by name."""
    return {**_merge(find_rooms().values(), kind), **list_own(kind)}


def _merge(rooms: Iterable[Room], kind: str) -> dict[str, str]:
    return {name: ref for room in rooms for name, ref in room.entries.get(kind, {}).items()}


def load_entry(kind: str, name: str) -> Any:
    """Import an entry. Raises KeyError for an unknown name, ConfigError if its module lacks it."""
    entry = list_entries(kind)[name]
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    loaded = import_module(module)
    if attribute and not hasattr(loaded, attribute):
        raise ConfigError(f"no '{attribute}' in {module}", entry)
    return getattr(loaded, attribute) if attribute else loaded


def find_entry(kind: str, name: str, setting: str) -> Any:
    """Import the entry that a setting names. Raises ConfigError if there is none."""
    names = list_entries(kind)
    if name not in names:
        raise ConfigError(f"no {kind} {name!r}", setting, f"choose one of {', '.join(names)}")
    return load_entry(kind, name)


def call_entries(kind: str, *arguments: Any) -> list[Any]:
    """Call each entry of a kind, and return the results that are not None."""
    results = [load_entry(kind, name)(*arguments) for name in list_entries(kind)]
    return [result for result in results if result is not None]
