"""A YAML of another program as its leaves: dotted keys, texts, and the line each was written in.

In: a file. Out: a `Tree` whose leaves are taken one by one, so that what nobody took is known in the end. `${name}`
stands for another value of the file, as OmegaConf has it. Absent: tags and anchors, which plain files do not use.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from megatoken.errors import Exit, Fault

LARGEST_BYTES = 1 << 20
MOST_LEAVES = 100_000
REFERENCE = re.compile(r"\$\{([\w.]+)\}")


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value as written. where: file:line."""

    key: str
    text: str
    where: str

    def integer(self) -> int:
        value = self.number()
        if value != int(value):
            raise Fault(Exit.CONFIG, f"{self.key} is {self.text!r}, not a whole number", self.where, "correct it")
        return int(value)

    def number(self) -> float:
        try:
            value = float(self.text.replace("_", ""))
            if math.isfinite(value):
                return value
            raise ValueError
        except ValueError:
            raise Fault(Exit.CONFIG, f"{self.key} is {self.text!r}, not a number", self.where, "correct it") from None

    def value(self) -> Any:
        """What YAML takes the text for: a truth, a number or a word."""
        words = {"true": True, "false": False, "null": None, "": None}
        if self.text.lower() in words:
            return words[self.text.lower()]
        try:
            return float(self.text)
        except ValueError:
            return self.text


class Tree:
    """The leaves of a file that nobody has taken yet, by dotted key; parts of a list are numbered from 0."""

    def __init__(self, path: Path, leaves: dict[str, Leaf]) -> None:
        self.path = path
        self.leaves = leaves

    def take(self, *keys: str) -> Leaf | None:
        """The first of these that is there, which is then taken; empty values count as absent."""
        for key in keys:
            leaf = self.leaves.pop(key, None)
            if leaf is not None and leaf.value() is not None:
                return leaf
        return None

    def need(self, *keys: str) -> Leaf:
        """The same, or a Fault(CONFIG) that names the first."""
        leaf = self.take(*keys)
        if leaf is None:
            raise Fault(Exit.CONFIG, f"no {keys[0]}", str(self.path), f"give it as {' or '.join(keys)}")
        return leaf

    def under(self, prefix: str) -> list[Leaf]:
        """The leaves below a key."""
        return [leaf for key, leaf in self.leaves.items() if key.startswith(f"{prefix}.")]

    def take_kind(self, *sections: str) -> tuple[Leaf, str]:
        """What a section is, and the prefix of its values.

        Composer writes `optimizer: {adamw: {lr: 1}}`, llm-foundry `optimizer: {name: adamw, lr: 1}`. Raises
        Fault(CONFIG) when there is none.
        """
        for section in sections:
            if name := self.take(f"{section}.name"):
                return name, section
            if below := self.under(section):
                kind = below[0].key.removeprefix(f"{section}.").split(".")[0]
                return replace(below[0], key=section, text=kind), f"{section}.{kind}"
        raise Fault(Exit.CONFIG, f"no {sections[0].split('.')[0]}", str(self.path), "give one")


def read_tree(path: Path) -> Tree:
    """The leaves of a file. Raises Fault(CONFIG) naming file:line for one that cannot be read."""
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise Fault(Exit.CONFIG, "file is larger than 1 MiB", str(path), "is this the right one?")
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        leaves = {leaf.key: leaf for leaf in islice(_walk(root, path, ""), MOST_LEAVES)} if root else {}
    except (OSError, UnicodeDecodeError, RecursionError) as wrong:
        raise Fault(Exit.CONFIG, f"cannot read it: {wrong}", str(path), "check the file") from None
    except yaml.YAMLError as wrong:
        mark = getattr(wrong, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(wrong, "problem", None) or "unreadable"
        raise Fault(Exit.CONFIG, f"not valid YAML: {reason}", where, "check indentation and quotes") from None
    if len(leaves) == MOST_LEAVES:  # a few aliases of aliases are enough
        raise Fault(Exit.CONFIG, f"more than {MOST_LEAVES:,} values", str(path), "is this the right one?")
    return Tree(path, {key: replace(leaf, text=_fill(leaf, leaves)) for key, leaf in leaves.items()})


def _walk(node: yaml.Node, path: Path, key: str) -> Iterator[Leaf]:
    where = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.ScalarNode):
        yield Leaf(key, node.value, where)
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _walk(item, path, f"{key}.{number}" if key else str(number))
    elif isinstance(node, yaml.MappingNode):
        if not node.value and key:
            yield Leaf(key, "", where)
        for name, value in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise Fault(Exit.CONFIG, "a key must be a plain word", where, "write key: value")
            yield from _walk(value, path, f"{key}.{name.value}" if key else name.value)


def _fill(leaf: Leaf, leaves: dict[str, Leaf], depth: int = 0) -> str:
    """The text with every `${name}` replaced."""

    def look(match: re.Match[str]) -> str:
        found = leaves.get(match[1]) or leaves.get(f"variables.{match[1]}")
        if found is None or depth > 8:
            raise Fault(Exit.CONFIG, f"{leaf.key} names {match[0]}, which is not given", leaf.where, "write it out")
        return _fill(found, leaves, depth + 1)

    return REFERENCE.sub(look, leaf.text)
