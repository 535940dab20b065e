"""allocation_mode: three dialects, one meaning, and a caret under what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.allocation import Allocation, AllocationError, Dialect, Layout, Part
from trainer.allocation_text import parse
from trainer.config import RunConfig

DOTS, COLON, ENGINES = Dialect.DOTS, Dialect.COLON, Dialect.ENGINES

DEGREE = st.integers(1, 64)
ROLLOUT_LAYOUT = st.builds(Layout, data=DEGREE, tensor=DEGREE, pipeline=DEGREE)
REPLICATED = st.builds(
    lambda replicas, shard, tensor: Layout(replicas * shard, tensor, shard=shard), st.integers(2, 64), DEGREE, DEGREE
)
FSDP_LAYOUT = st.builds(Layout, data=DEGREE, tensor=DEGREE, context=DEGREE) | REPLICATED
MEGATRON_LAYOUT = st.builds(Layout, data=DEGREE, tensor=DEGREE, pipeline=DEGREE, context=DEGREE)
ROLLOUT = st.builds(Part, st.sampled_from(["sglang", "vllm"]), ROLLOUT_LAYOUT)
TRAINING = st.builds(Part, st.just("fsdp"), FSDP_LAYOUT) | st.builds(Part, st.just("megatron"), MEGATRON_LAYOUT)


@st.composite
def same_gpus(draw: st.DrawFn) -> Allocation:
    """One engine of each kind on the same GPUs."""
    layout = draw(st.builds(Layout, data=DEGREE, tensor=DEGREE))
    rollout = Part(draw(st.sampled_from(["sglang", "vllm"])), layout)
    return Allocation(((rollout, Part("fsdp", Layout(layout.gpus))),))


APART = st.builds(lambda rollout, training: Allocation(((rollout,), (training,))), ROLLOUT, TRAINING)
ALONE = st.builds(lambda part: Allocation(((part,),)), ROLLOUT | TRAINING)


@pytest.mark.parametrize(
    ("text", "dialect", "gpus", "rollout", "training"),
    [
        ("sglang.d4p1m1+d2p2m1", DOTS, 8, ("sglang", Layout(4)), ("", Layout(2, pipeline=2))),
        ("sglang.d4m1p1+d2m1p2", DOTS, 8, ("sglang", Layout(4)), ("", Layout(2, pipeline=2))),
        ("d2p2m1+sglang.d4p1m1", DOTS, 8, ("sglang", Layout(4)), ("", Layout(2, pipeline=2))),
        ("sglang.d8m8p1+d4p4m4", DOTS, 128, ("sglang", Layout(8, 8)), ("", Layout(4, 4, 4))),
        ("vllm.d4p1m4+d8p2m1", DOTS, 32, ("vllm", Layout(4, 4)), ("", Layout(8, pipeline=2))),
        ("d32p1m4", DOTS, 128, None, ("", Layout(32, 4))),
        ("actor_gen:d4p1m2,*:d4p2m1", DOTS, 8, ("", Layout(4, 2)), ("", Layout(4, pipeline=2))),
        ("sglang:d4p1t1+fsdp:d4", COLON, 8, ("sglang", Layout(4)), ("fsdp", Layout(4))),
        ("sglang:d4p1t1 + fsdp:d4", COLON, 8, ("sglang", Layout(4)), ("fsdp", Layout(4))),
        ("sglang:d4+d4", COLON, 8, ("sglang", Layout(4)), ("", Layout(4))),
        ("sglang:d3p1t1", COLON, 3, ("sglang", Layout(3)), None),
        ("sglang:d1+eval", COLON, 1, ("sglang", Layout(1)), None),
        ("sglang.d4p1t1+cpu", DOTS, 4, ("sglang", Layout(4)), None),
        ("vllm[rollout]:d2t2|fsdp[actor]:d4", COLON, 4, ("vllm", Layout(2, 2)), ("fsdp", Layout(4))),
        ("sglang:d4|fsdp:d4", COLON, 4, ("sglang", Layout(4)), ("fsdp", Layout(4))),
        ("rollout.backend=sglang:d4t1 actor.backend=fsdp:d4", ENGINES, 8, ("sglang", Layout(4)), ("fsdp", Layout(4))),
        ("sglang:d8+fsdp:d4s2t2", COLON, 16, ("sglang", Layout(8)), ("fsdp", Layout(4, 2, shard=2))),
        ("sglang:d4|fsdp:s4d4", COLON, 4, ("sglang", Layout(4)), ("fsdp", Layout(4))),
        ("actor=fsdp:d2; rollout=vllm:d1t2", ENGINES, 4, ("vllm", Layout(1, 2)), ("fsdp", Layout(2))),
        (
            "rollout.backend=sglang:d4 actor.backend=fsdp:d4 actor.scheduling_strategy.type=colocation "
            "actor.scheduling_strategy.target=rollout",
            ENGINES,
            4,
            ("sglang", Layout(4)),
            ("fsdp", Layout(4)),
        ),
    ],
)
def test_every_dialect_is_read(
    text: str,
    dialect: Dialect,
    gpus: int,
    rollout: tuple[str, Layout] | None,
    training: tuple[str, Layout] | None,
) -> None:
    allocation = parse(text)

    assert (allocation.dialect, allocation.gpus) == (dialect, gpus)
    assert (allocation.rollout and (allocation.rollout.backend, allocation.rollout.layout)) == rollout
    assert (allocation.training and (allocation.training.backend, allocation.training.layout)) == training


def test_engines_that_share_their_gpus_count_once() -> None:
    allocation = parse("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4")

    assert (allocation.gpus, allocation.rollout_gpus, allocation.training_gpus) == (6, 2, 4)
    assert not allocation.colocated
    assert parse("sglang:d4|fsdp:d4").colocated


def test_experts_lie_on_the_gpus_of_attention() -> None:
    allocation = parse("sglang:d4t4+megatron:(attn:d4p2t2c2|ffn:d2p2e8)")

    assert allocation.gpus == 16 + 32
    assert allocation.training is not None
    assert allocation.training.experts == Layout(data=2, pipeline=2, expert=8)
    assert parse("megatron:d4t2e4").gpus == 8


@pytest.mark.parametrize(
    ("text", "dialect", "converted"),
    [
        ("sglang.d4p1m1+d2p2m1", COLON, "sglang:d4+megatron:d2p2"),
        ("sglang.d4p1m1+d4p1m1", COLON, "sglang:d4+fsdp:d4"),
        ("sglang.d4p1m1+d2p2m1", ENGINES, "rollout.backend=sglang:d4 actor.backend=megatron:d2p2"),
        ("sglang:d4p1t1+fsdp:d4", DOTS, "sglang.d4p1m1+d4p1m1"),
        ("sglang:d8t8+megatron:d4p4t4", DOTS, "sglang.d8p1m8+d4p4m4"),
        ("rollout.backend=sglang:d4t2 actor.backend=fsdp:d8", COLON, "sglang:d4t2+fsdp:d8"),
        ("rollout.backend=sglang:d4t2 actor.backend=fsdp:d8", DOTS, "sglang.d4p1m2+d8p1m1"),
        ("sglang:d4|fsdp:d4", COLON, "sglang[rollout]:d4|fsdp[actor]:d4"),
        ("actor_gen:d4p1m2,*:d4p2m1", COLON, "vllm[actor_gen]:d4t2|megatron[actor]:d4p2"),
        ("sglang:d1+eval", DOTS, "sglang.d1p1m1+eval"),
    ],
)
def test_dialects_are_converted(text: str, dialect: Dialect, converted: str) -> None:
    assert parse(text).convert(dialect) == converted
    assert parse(converted).gpus == parse(text).gpus


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sglang:d4|fsdp:d4", "shares its GPUs"),
        ("megatron:d4c2", "no context"),
        ("sglang[a]:d4+fsdp[b]:d4", "names no engines"),
        ("fsdp:d4s2", "no replicas"),
    ],
)
def test_what_the_dotted_form_cannot_say_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse(text).convert(DOTS)


@pytest.mark.parametrize(
    ("text", "wrong", "says"),
    [
        ("sglang.d4x1m1+d2p2m1", "x", "'x' is no kind of parallelism"),
        ("sglan:d4+fsdp:d4", "sglan", "did you mean sglang"),
        ("sglang:d4m2+fsdp:d4", "m", "tensor parallel is written t"),
        ("sglang:d4+fsdp:d2p2", "p2", "FSDP shards instead of a pipeline"),
        ("sglang:d4e2+fsdp:d2", "e2", "expert"),
        ("sglang:d4d2", "d2", "given twice"),
        ("sglang:d0+fsdp:d1", "0", "at least 1"),
        ("sglang:d04+fsdp:d1", "04", "leading zero"),
        ("sglang:d+fsdp:d1", "+", "needs a number"),
        ("sglang:d9999999", "9999999", "too large"),
        ("sglang:d4+", "", "a layout is missing"),
        ("sglang:d4 fsdp:d4", "fsdp", "'+'"),
        ("sglang:d4+fsdp:d4+eval", "eval", "nothing is trained"),
        ("sglang:d4|fsdp:d2", "fsdp", "equally many"),
        ("sglang:d4+vllm:d2", "vllm", "two engines that generate"),
        ("sglang:d2+fsdp[a]:d4+fsdp[c]:d4", "sglang", "each needs a name"),
        ("sglang[a]:d4+fsdp[a]:d4", "fsdp", "given twice"),
        ("sglang.d4p1m1+fsdp:d4", ":d4", "is the colon form"),
        ("fsdp.d4", ".", "only what generates"),
        ("sglang[1a]:d4", "1a", "a name"),
        ("fsdp:(attn:d2|ffn:d2)", "(attn", "no expert parallelism"),
        ("megatron:(attn:d4|ffn:d2e4)", "ffn", "attn is laid out on 4 GPUs and ffn on 8"),
        ("megatron:d4p2e3", "megatron", "does not divide"),
        ("sglang:d4+fsdp:d8s3", "fsdp", "s3 does not divide d8"),
        ("sglang:d4s2+fsdp:d4", "s2", "shards (s) are no part of sglang"),
        ("sglang:d4+megatron:d4s2", "s2", "write the training side as fsdp:"),
        ("heuristic", "heuristic", "leaves the layout open"),
        ("rollout.backend=sglang:d4 actor.backend=d4", "d4", "needs a backend"),
        ("rollout.backend=sglang:d4 rollout.backend=sglang:d2", "rollout.backend=sglang:d2", "given twice"),
        ("rollout.backend=sglang:d4+fsdp:d4", "+", "one engine per setting"),
        ("rollout.learning_rate=1", "rollout", "says nothing about GPUs"),
        ("", "", "empty"),
    ],
)
def test_a_mistake_has_a_caret_below_it(text: str, wrong: str, says: str) -> None:
    with pytest.raises(AllocationError) as raised:
        parse(text)

    error = raised.value
    assert error.position == (text.rindex(wrong) if wrong else len(text))
    assert says in str(error)
    _, shown, caret, *_ = str(error).split("\n")
    assert shown[caret.index("^") :] == text[error.position :]


@given(APART | ALONE | same_gpus())
def test_what_is_written_is_read_again_in_colons_and_engines(allocation: Allocation) -> None:
    for dialect in (COLON, ENGINES):
        text = allocation.convert(dialect)
        again = parse(text)

        assert again == allocation
        assert str(again) == text


@given(ROLLOUT, st.builds(Layout, data=DEGREE, tensor=DEGREE, pipeline=DEGREE))
def test_what_is_written_is_read_again_in_dots(rollout: Part, training: Layout) -> None:
    allocation = Allocation(((rollout,), (Part("", training),)))

    assert parse(allocation.convert(DOTS)) == allocation
    # Through the other dialects the layouts stay, and the engine that was not named gets its name.
    for dialect in (COLON, ENGINES):
        other = parse(allocation.convert(dialect))
        assert [part.layout for part in other.parts] == [rollout.layout, training]
        assert parse(other.convert(DOTS)) == allocation


@given(st.text(alphabet="sglanvmfdp:.+|[]()0123456789 dtpcem=*,_\t\n", max_size=40) | st.text(max_size=20))
def test_no_text_breaks_the_reader(text: str) -> None:
    position = 0
    try:
        allocation = parse(text)
        assert allocation.gpus >= 1
        assert parse(allocation.convert(COLON)).gpus == allocation.gpus
    except AllocationError as error:
        position = error.position
    assert 0 <= position <= len(text)


def test_a_configuration_checks_it() -> None:
    with pytest.raises(ValidationError, match=r"\^"):
        RunConfig.model_validate({"allocation_mode": "sglang:d4q2"})
    with pytest.raises(ValidationError, match=r"for 8 GPUs \(4 generate and 4 train\).*n_gpus_per_node=4 = 4"):
        RunConfig.model_validate({"allocation_mode": "sglang:d4+fsdp:d4", "n_gpus_per_node": 4})
    with pytest.raises(ValidationError, match=r"for 4 GPUs .*the same ones"):
        RunConfig.model_validate({"allocation_mode": "sglang:d4|fsdp:d4", "n_gpus_per_node": 8})
    assert RunConfig.model_validate({"allocation_mode": "sglang:d4+fsdp:d4", "n_gpus_per_node": 8}).gpus == 8
