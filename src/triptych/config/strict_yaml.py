"""One YAML document from a file, or a `ConfigError` that says where it is wrong.

Plain data only: mappings with string keys, lists, strings, numbers, booleans, null. Checked on the node graph, before
anything is built: repeated keys, foreign tags, numbers that are not finite, and how large aliases would expand to.
Numbers are read as YAML 1.2 does (`1e-1` is one, `010` and `1:30` are text).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from triptych.config.fields import Location, key_path
from triptych.errors import ConfigError

__all__ = ["load_yaml"]

_MAX_FILE_BYTES = 64 * 1024
_MAX_NODES = 10_000  # a stage file has some dozens
_MAX_DEPTH = 100
_TOO_DEEP = f"nested too deeply, wanted at most {_MAX_DEPTH} levels"
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers of YAML 1.2 and no dates."""

    # A copy of its own, so that the loader of PyYAML stays as it is.
    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag.rpartition(":")[2] not in ("int", "float", "timestamp", "value")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        # Stops before the scanner, whose cost grows with the square of the depth, reads on.
        if parent is not None and self._depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=parent.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def load_yaml(path: str | Path) -> Any:
    """The document in `path` as plain data. Raises `ConfigError`."""
    text = _read(Path(path))
    try:
        loader = _Loader(text)
        node = loader.get_node() if loader.check_node() else None
        if node is None:
            raise ConfigError("the file is empty", where=str(path), wanted="a mapping with the key `stages`")
        if loader.check_node():
            raise ConfigError("the file holds several YAML documents", where=str(path), wanted="one document")
        _Audit(str(path)).check(node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"not valid YAML: {error.problem or error.context}", where=place) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", where=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"a number cannot be read: {error}", where=str(path)) from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise ConfigError("is a directory", where=str(path), wanted="a YAML file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), wanted="a YAML file") from error
    except ValueError as error:  # a null byte in the name
        raise ConfigError(f"cannot be read: {error}", where=repr(str(path)), wanted="a YAML file") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError("the file is too large", where=str(path), wanted=f"at most {_MAX_FILE_BYTES // 1024} KiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = data[error.start : error.start + 1]
        raise ConfigError(
            f"not UTF-8 at byte {error.start}", where=str(path), found=found, wanted="a UTF-8 text file"
        ) from None


@dataclass(frozen=True, slots=True)
class _Extent:
    """Nodes and levels of a node once its aliases are expanded."""

    nodes: int
    levels: int


class _Audit:
    """Walks the node graph once (an alias is the same node again) and measures what it would expand to."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._extents: dict[int, _Extent] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node, location: Location = ()) -> _Extent:
        """Expanded extent of `node`. Raises `ConfigError`."""
        if id(node) in self._extents:
            return self._extents[id(node)]
        if id(node) in self._open:
            raise self._error(location, "an anchor contains itself", wanted="no recursive aliases")
        if node.tag not in _PLAIN_TAGS:
            raise self._error(location, "YAML tag is not plain data", found=node.tag, wanted="no tag")
        self._open.add(id(node))
        parts = self._children(node, location)
        self._open.discard(id(node))
        nodes = 1 + sum(part.nodes for part in parts)
        levels = 1 + max((part.levels for part in parts), default=0)
        if nodes > _MAX_NODES:
            raise self._error(
                location, "aliases expand too far", found=f"{nodes} nodes", wanted=f"at most {_MAX_NODES} nodes"
            )
        if levels > _MAX_DEPTH:
            raise self._error(location, _TOO_DEEP)
        extent = self._extents[id(node)] = _Extent(nodes, levels)
        return extent

    def _children(self, node: yaml.Node, location: Location) -> list[_Extent]:
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node, location)
            return [self.check(value, (*location, key.value)) for key, value in node.value]
        if isinstance(node, yaml.SequenceNode):
            return [self.check(entry, (*location, index)) for index, entry in enumerate(node.value)]
        if node.tag.endswith(":float") and node.value.lower().lstrip("-+") in (".inf", ".nan"):
            raise self._error(location, "the number is not finite", found=node.value, wanted="a finite number")
        return []

    def _check_keys(self, node: yaml.MappingNode, location: Location) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
                raise self._error(location, f"line {key.start_mark.line + 1}: a key is not text", wanted="string keys")
            if key.value in lines:
                line = key.start_mark.line + 1
                raise self._error(
                    (*location, key.value),
                    "the key is given twice",
                    found=f"lines {lines[key.value]} and {line}",
                    wanted="each key once",
                )
            lines[key.value] = key.start_mark.line + 1

    def _error(
        self, location: Location, message: str, *, found: object = None, wanted: str | None = None
    ) -> ConfigError:
        path = key_path(location)
        return ConfigError(message, where=f"{self._file}: {path}" if path else self._file, found=found, wanted=wanted)
