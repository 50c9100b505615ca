"""Find what rooms add to the core. The core itself names no other room.

A room is a package of megatoken with a module `room`, or a single module. Training needs the rooms
in CORE; any other room can be deleted, together with what it adds. ENTRIES in a room says what it
adds: for each kind of entry ("command", ...), a dict from names to references, `module` or
`module:attribute`. References are imported when they are used. NEEDS lists the rooms outside the
core that a room imports; if one of them is missing, the room is ignored. Both are literals, which
are read without importing the module.
"""

import ast
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

CORE = ("base", "data", "model", "optim", "distributed", "store", "train")
PACKAGE = Path(__file__).parents[1]


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


def list_entries(kind: str) -> Mapping[str, str]:
    """Return the references of the entries of a kind, by name."""
    return {
        name: reference
        for room in find_rooms().values()
        for name, reference in room.entries.get(kind, {}).items()
    }


def load_entry(kind: str, name: str) -> Any:
    """Import an entry. Raises KeyError if no room adds it."""
    module, _, attribute = list_entries(kind)[name].partition(":")
    loaded = import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def call_entries(kind: str, *arguments: Any) -> list[Any]:
    """Call each entry of a kind, and return the results that are not None."""
    results = [load_entry(kind, name)(*arguments) for name in list_entries(kind)]
    return [result for result in results if result is not None]
