"""What keys mean: the comments of the YAML files in `configs/` and `recipes/`, read where they
stand.

The comment of a key stands in its line, behind its value. The comment at the top of a file
describes the option that the file is. Keys that no option sets are in `configs/classes.yaml`, by
class.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import yaml

from fp4train.config.binding import KeyField
from fp4train.config.folders import CONFIGS, RECIPES

CLASSES = CONFIGS / "classes.yaml"
_PLACE = re.compile(r"# @package\b")


@dataclass(frozen=True, kw_only=True)
class Comments:
    """The comments of one YAML file.

    Args:
        header: comment at its top.
        keys: full key in the file → its comment; keys in a list's items are those of the list.
        classes: (class, field) that keys are of → the comment; a section that names no class stands
            for itself.
    """

    header: str
    keys: Mapping[str, str]
    classes: Mapping[tuple[str, str], str]


@cache
def comments(path: Path) -> Comments:
    """The comments of a YAML file, which is read once."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    keys: dict[str, str] = {}
    classes: dict[tuple[str, str], str] = {}
    for entry in _entries(yaml.compose(text, Loader=yaml.SafeLoader), ""):
        comment = entry.comment(lines)
        if comment:
            keys.setdefault(entry.key, comment)
            owner, _, name = entry.key.rpartition(".")
            classes.setdefault((entry.owner or owner, name), comment)
    return Comments(header=_header(lines), keys=keys, classes=classes)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A key of a YAML file: its full name, the class that its mapping names, and its nodes."""

    key: str
    owner: str
    name: yaml.Node
    value: yaml.Node

    def comment(self, lines: list[str]) -> str:
        """The comment in the line of the key, behind a value that ends there."""
        row = self.name.start_mark.line
        inline = self.value.end_mark.line == row
        begin = (self.value if inline else self.name).end_mark.column
        behind = re.search(r"(?:^|\s)#(.*)$", lines[row][begin:])
        if behind is None:
            return ""
        return behind[1].strip()


def _entries(node: yaml.Node | None, prefix: str) -> Iterator[_Entry]:
    """The keys below a node, those of mappings in lists as those of the list."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _entries(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    named = [value.value for name, value in node.value if name.value == "_target_"]
    owner = str(named[0]) if named else ""
    for name, value in node.value:
        yield _Entry(key=f"{prefix}{name.value}", owner=owner, name=name, value=value)
        yield from _entries(value, f"{prefix}{name.value}.")


@cache
def _base(path: Path) -> str:
    """The option that the file of an option begins with; empty: there is none."""
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    listed = body.get("defaults", []) if isinstance(body, dict) else []
    return next((item for item in listed if isinstance(item, str) and item != "_self_"), "")


def _header(lines: Iterable[str]) -> str:
    """The comment at the top of a file, without the line that is Hydra's."""
    top: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            break
        if not _PLACE.match(line):
            top.append(line.lstrip("#"))
    return " ".join(" ".join(top).split())


@dataclass(frozen=True, kw_only=True)
class Descriptions:
    """The descriptions of fp4train's keys and options, and of those in the user's own folders."""

    folders: tuple[Path, ...] = ()

    def option(self, group: str, name: str) -> str:
        """The description of an option of a group; empty for one that is no file."""
        path = self.file(group, name)
        if path is not None:
            return comments(path).header
        return ""

    def group(self, name: str) -> str:
        """The description of a group."""
        parent, _, last = name.rpartition("/")
        if parent:
            files = sorted((CONFIGS / parent).glob("*.yaml"))
        else:
            files = [CONFIGS / "train.yaml"]
        texts = (comments(path).keys.get(f"defaults.{last}", "") for path in files)
        return next((text for text in texts if text), "")

    def key(self, key: KeyField, group: str, name: str) -> str:
        """The description of a key, or an empty text.

        It is that of the file of the chosen option, of the option that this one begins with, of the
        class, or of train.yaml.

        Args:
            group: group of the section that the key is in; empty for the keys that train.yaml
                itself sets.
            name: chosen option of that group; empty for those keys, too.
        """
        below = key.path.removeprefix(group.replace("/", ".") + ".")
        if group:
            path = self.file(group, name)
        else:
            path = CONFIGS / "train.yaml"
        while path is not None:
            if text := comments(path).keys.get(below, ""):
                return text
            path = self.file(group, _base(path))
        for kind in getattr(key.owner, "__mro__", ()):  # a class may inherit the field
            if text := self._of_fields.get((kind.__name__, key.name), ""):
                return text
        return ""

    @cached_property
    def _of_fields(self) -> Mapping[tuple[str, str], str]:
        """(Name of a class, field) → what the files say of it."""
        described: dict[tuple[str, str], str] = {}
        for folder in (CONFIGS, RECIPES, *self.folders):
            for pattern in ("*.yaml", "*/*.yaml", "*/*/*.yaml"):
                for path in sorted(folder.glob(pattern)):
                    for (owner, name), text in comments(path).classes.items():
                        described.setdefault((owner.rpartition(".")[2], name), text)
        return described

    def file(self, group: str, name: str) -> Path | None:
        """The file of an option; None where it is none of a folder."""
        own_folder = RECIPES if group == "recipe" else CONFIGS / group
        places = [own_folder, *(folder / group for folder in self.folders)]
        return next(
            (place / f"{name}.yaml" for place in places if (place / f"{name}.yaml").is_file()), None
        )
