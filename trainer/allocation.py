"""allocation_mode: which GPUs generate, which train, and how a model is split over them.

Three dialects say the same thing, and all are read, checked and written:

* dots (AReaL v0.1 and v0.2): `sglang.d4p1m1+d2p2m1`, `d32p1m4`, `actor_gen:d4p1m2,*:d4p2m1`; m is tensor parallel
* colon (AReaL v0.3.1 to v0.5): `sglang:d4p1t1+fsdp:d4`, `sglang[rollout]:d4|fsdp[actor]:d4` (the same GPUs),
  `sglang:d4+eval`, `megatron:(attn:d2t2|ffn:d1e4)`
* engines (AReaL 1.0 and later): `rollout.backend=sglang:d4t1 actor.backend=fsdp:d4`

A layout is d (data) x t (tensor) x p (pipeline) x c (context); e (expert) divides GPUs that the others count already,
and so does s, which is ours: FSDP shards a model over s of the d ranks, and the others are replicas (HSDP). It takes no
GPUs, so that d means what it means to AReaL, and the text without its s is AReaL's.
Text that cannot be read is answered with a caret under the wrong character (`AllocationError`).
Pure standard library: both sides read this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

ROLLOUT_BACKENDS = ("sglang", "vllm")
TRAINING_BACKENDS = ("fsdp", "megatron", "archon")
TAILS = ("eval", "cpu")
"""`+eval`, `+cpu`: beside the servers runs a process without a GPU, nothing is trained."""


class Dialect(StrEnum):
    """The three ways of writing an allocation."""

    DOTS = "dots"
    COLON = "colon"
    ENGINES = "engines"


class AllocationError(ValueError):
    """Text that is no allocation. position: index of the wrong character, which the message marks with a caret."""

    def __init__(self, text: str, position: int, problem: str, fix: str = "") -> None:
        self.text, self.position, self.problem, self.fix = text, position, problem, fix
        super().__init__("\n".join(filter(None, [problem, f"    {text}", f"    {' ' * position}^", fix])))


@dataclass(frozen=True)
class Layout:
    """How one model is split: data, tensor, pipeline, context and expert parallel degrees, each at least 1.

    shard: data parallel ranks that the weights are sharded over (it divides `data`); 0: all.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    shard: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of the layout; experts lie on GPUs that the other degrees count."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def per_replica(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def sharded_over(self) -> int:
        """GPUs that hold one copy of what is trained, all parts together; a pipeline is folded into FSDP's ranks."""
        return self.shard * self.tensor * self.context if self.shard else self.gpus


@dataclass(frozen=True)
class Part:
    """One engine.

    backend: empty where the text names none.
    layout: how the model is split.
    name: of the engine (colon, engines) or of the call (dots: `actor_gen`, `*`).
    experts: layout of the experts, where they have their own.
    """

    backend: str
    layout: Layout
    name: str = ""
    experts: Layout | None = None

    @property
    def generates(self) -> bool:
        """Whether it samples; else it trains."""
        return self.backend in ROLLOUT_BACKENDS or self.name.endswith("_gen")

    @property
    def gpus(self) -> int:
        """GPUs that it runs on."""
        return self.layout.gpus

    @property
    def trainer(self) -> str:
        """Backend of a training part. AReaL's rule where none is named: FSDP, or Megatron for pipelines and experts."""
        needs_megatron = self.layout.pipeline > 1 or self.layout.expert > 1 or self.experts is not None
        return self.backend or ("megatron" if needs_megatron else "fsdp")


@dataclass(frozen=True)
class Allocation:
    """The engines of a run and their GPUs. Two allocations that mean the same are equal, whatever their dialect.

    groups: parts of one group share GPUs, groups do not.
    tail: `eval` or `cpu` where the text ends with it.
    dialect: the dialect that it was written in.
    """

    groups: tuple[tuple[Part, ...], ...]
    tail: str = ""
    dialect: Dialect = field(default=Dialect.COLON, compare=False)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All engines in the order of the text."""
        return tuple(part for group in self.groups for part in group)

    @property
    def rollout(self) -> Part | None:
        """The (first) engine that samples."""
        return next((part for part in self.parts if part.generates), None)

    @property
    def training(self) -> Part | None:
        """The engine that trains: the last, because `*` and the actor's own part come after what only infers."""
        return next((part for part in reversed(self.parts) if not part.generates), None)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(group[0].gpus for group in self.groups)

    @property
    def rollout_gpus(self) -> int:
        """GPUs that sample, those that they share with training included."""
        return sum(part.gpus for part in self.parts if part.generates)

    @property
    def training_gpus(self) -> int:
        """GPUs that train; the number of FSDP ranks."""
        return self.training.gpus if self.training else 0

    @property
    def colocated(self) -> bool:
        """Whether sampling and training take turns on the same GPUs."""
        return any(len({part.generates for part in group}) == 2 for group in self.groups)

    def convert(self, dialect: Dialect) -> str:
        """Write it in a dialect, degrees of 1 left out where the dialect allows.

        Raises:
            ValueError: the dialect has no words for it.
        """
        return {Dialect.DOTS: _dots, Dialect.COLON: _colon, Dialect.ENGINES: _engines}[dialect](self)

    def __str__(self) -> str:
        return self.convert(self.dialect)

    def resized(self, rollout: Layout | None, training: Layout | None) -> Allocation:
        """The same engines with other layouts; per-call lists and experts keep only what both sides need."""

        def other(part: Part) -> Part:
            layout = rollout if part.generates else training
            return replace(part, layout=layout, experts=None) if layout else part

        return replace(self, groups=tuple(tuple(other(part) for part in group) for group in self.groups))


def _dots(allocation: Allocation) -> str:
    _only_what_dots_can_say(allocation)
    texts = []
    for group in allocation.groups:
        if len(group) > 1 or group[0].name:
            parts = [f"{part.name}:{_dots_layout(part.layout)}" for part in group]
            texts.append(",".join(parts))
        else:
            backend = f"{group[0].backend}." if group[0].generates else ""
            texts.append(backend + _dots_layout(group[0].layout))
    return "+".join([*texts, *filter(None, [allocation.tail])])


def _only_what_dots_can_say(allocation: Allocation) -> None:
    rollouts = [part for part in allocation.parts if part.generates]
    for part in allocation.parts:
        if part.experts or part.layout.context > 1 or part.layout.expert > 1:
            raise ValueError("the dotted form has no context and no expert parallelism: use the colon form")
        if part.layout.shard:
            raise ValueError("the dotted form has no replicas of what is trained (s): use the colon form")
        if part.name and part.backend:
            raise ValueError("the dotted form names no engines: use the colon form")
    if allocation.colocated and any(part.backend for part in rollouts):
        raise ValueError("the dotted form cannot name an engine that shares its GPUs with training: use the colon form")
    if len(allocation.groups) > 2:
        raise ValueError("the dotted form has at most one engine that generates and one that trains")


def _dots_layout(layout: Layout) -> str:
    return f"d{layout.data}p{layout.pipeline}m{layout.tensor}"


def _colon(allocation: Allocation) -> str:
    named = _named(allocation)
    plain = len(allocation.parts) < 3 and not allocation.colocated and not any(part.name for part in allocation.parts)
    names = {part: "" if plain else f"[{name}]" for part, name in named.items()}
    groups = [
        "|".join(f"{_backend(part)}{names[part]}:{_colon_layout(part)}" for part in group)
        for group in allocation.groups
    ]
    return "+".join([*groups, *filter(None, [allocation.tail])])


def _colon_layout(part: Part) -> str:
    if part.experts is None:
        return _letters(part.layout)
    return f"(attn:{_letters(part.layout)}|ffn:{_letters(part.experts)})"


def _letters(layout: Layout) -> str:
    degrees = {"d": layout.data, "p": layout.pipeline, "t": layout.tensor, "c": layout.context, "e": layout.expert}
    written = [f"{letter}{degree}" for letter, degree in degrees.items() if degree > 1 or letter == "d"]
    if layout.shard:
        written.insert(1, f"s{layout.shard}")
    return "".join(written)


def _engines(allocation: Allocation) -> str:
    named, settings = _named(allocation), []
    for group in allocation.groups:
        for part in group:
            settings.append(f"{named[part]}.backend={_backend(part)}:{_colon_layout(part)}")
            if part is not group[0]:
                settings += [
                    f"{named[part]}.scheduling_strategy.type=colocation",
                    f"{named[part]}.scheduling_strategy.target={named[group[0]]}",
                ]
    return " ".join(settings)


def _backend(part: Part) -> str:
    # A generating call without a backend is AReaL v0.1's, where vLLM generated.
    return part.backend or ("vllm" if part.generates else part.trainer)


def _named(allocation: Allocation) -> dict[Part, str]:
    """A name for every part: its own, else what AReaL calls that role."""
    return {
        part: part.name.replace("*", "actor") or ("rollout" if part.generates else "actor") for part in allocation.parts
    }
