"""Records: what comes from outside is validated, what goes out is plain."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from typing import Annotated

import pytest
from pydantic import ValidationError

from clusterkit.common.records import Limits, Record


@dataclass(frozen=True, kw_only=True)
class Leaf(Record):
    name: str
    port: Annotated[int, Limits(ge=1, le=9)] | None = None
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Tree(Record):
    name: Annotated[str, Limits(pattern="^[a-z]+$")] = "tree"
    leaves: Annotated[tuple[Leaf, ...], Limits(min_length=1)]
    best: Leaf = Leaf(name="none")
    by_name: dict[str, Leaf] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == "bush":
            raise ValueError("no tree")


LEAF = Leaf(name="a", words=("x", "y"))


def test_a_mapping_becomes_a_record_with_those_within_it() -> None:
    values = {"leaves": [LEAF, {"name": "b", "port": 9}], "by_name": {"c": {"name": "c"}}}

    assert Tree.model_validate(values) == Tree(leaves=(LEAF, Leaf(name="b", port=9)), by_name={"c": Leaf(name="c")})


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({}, ("leaves",)),
        ({"leaves": []}, ("leaves",)),
        ({"leaves": [{"name": 1}]}, ("leaves", 0, "name")),
        ({"leaves": [{"name": "a", "port": 10}]}, ("leaves", 0, "port")),
        ({"leaves": [{"name": "a", "colour": "red"}]}, ("leaves", 0, "colour")),
        ({"leaves": [LEAF], "name": "Tree"}, ("name",)),
        ({"leaves": [LEAF], "name": "bush"}, ()),
        ("leaves", ()),
    ],
)
def test_what_is_wrong_is_refused_where_it_stands(values: object, place: tuple[object, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        Tree.model_validate(values)

    assert caught.value.errors()[0]["loc"] == place


def test_a_dump_is_read_back() -> None:
    tree = Tree(leaves=(LEAF,), best=LEAF)

    assert Tree.model_validate(tree.model_dump()) == tree
    assert tree.model_dump(mode="json", exclude={"name", "by_name"}) == {
        "leaves": [{"name": "a", "port": None, "words": ["x", "y"]}],
        "best": {"name": "a", "port": None, "words": ["x", "y"]},
    }


def test_a_dump_can_leave_out_what_is_not_set() -> None:
    assert Tree(leaves=(LEAF,)).model_dump(exclude_defaults=True) == {"leaves": ({"name": "a", "words": ("x", "y")},)}


def test_a_copy_differs_only_where_asked() -> None:
    copied = LEAF.model_copy(update={"port": 3})

    assert (copied.name, copied.port, copied.words) == ("a", 3, ("x", "y"))
    assert LEAF.port is None
    with pytest.raises(FrozenInstanceError):
        copied.port = 4  # type: ignore[misc]
