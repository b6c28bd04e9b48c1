"""Every struct that crosses a process comes back equal."""

from __future__ import annotations

import inspect
from types import UnionType
from typing import Any, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych import messages

STRUCTS = [
    struct
    for _, struct in inspect.getmembers(messages, inspect.isclass)
    if issubclass(struct, msgspec.Struct) and struct.__module__ == messages.__name__
]

i64 = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
scalars = st.one_of(i64, floats, st.text(max_size=10), st.booleans())
names = st.text(max_size=5)
plain = st.recursive(
    st.none() | scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner), max_leaves=5
)


def build(struct: type[msgspec.Struct], *, leaf: bool = False) -> st.SearchStrategy[msgspec.Struct]:
    """A strategy over all fields, with the open-ended ones narrowed to what msgpack carries.

    A struct that may hold another of its kind holds at most one level of them: a leaf none.
    """
    open_ended = {"engine_args": plain, "extra_args": scalars}
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(struct):
        if field.name in open_ended:
            fields[field.name] = st.dictionaries(names, open_ended[field.name], max_size=3)
        elif struct in get_args(field.type):
            fields[field.name] = st.none() if leaf else st.none() | build(struct, leaf=True)
        else:
            fields[field.name] = values(field.type)
    return st.builds(struct, **fields)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """A strategy by annotation; integers and floats are those that msgpack carries."""
    if kind is int:
        return i64
    if kind is float:
        return floats
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return build(kind)
    arguments = get_args(kind)
    if isinstance(kind, UnionType):
        return st.one_of(*map(values, arguments))
    if get_origin(kind) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=2).map(tuple)
        return st.tuples(*map(values, arguments))
    return st.from_type(kind)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_struct_comes_back_equal_through_msgpack(struct: type[msgspec.Struct]) -> None:
    decoder = msgspec.msgpack.Decoder(struct)

    @settings(max_examples=30, deadline=None)
    @given(build(struct))
    def check(value: msgspec.Struct) -> None:
        assert decoder.decode(msgspec.msgpack.encode(value)) == value

    check()


@pytest.mark.parametrize("union", [messages.ToReplica, messages.FromReplica], ids=["to_replica", "from_replica"])
def test_every_message_of_a_direction_is_told_apart_by_its_tag(union: type) -> None:
    members = get_args(union)
    tags = [member.__struct_config__.tag for member in members]
    assert None not in tags
    assert len(set(tags)) == len(members)


def test_every_struct_is_frozen() -> None:
    assert [struct.__name__ for struct in STRUCTS if not struct.__struct_config__.frozen] == []
