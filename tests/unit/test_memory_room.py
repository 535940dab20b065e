"""Whether a model's training fits into GPUs; models have their real shapes and no weights, and the numbers stand for
GPUs that are not there.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import small_config
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer.errors import RunError, UserError
from trainer.train.distributed import World
from trainer.train.gpu_footprint import (
    Footprint,
    out_of_memory,
    require_room,
    require_row_room,
    room_problem,
    row_bytes,
    row_problem,
)

GIB = 1 << 30
SERVED = ("servers.engine=sglang", "mode=ray", "n_gpus_per_node=8", "allocation_mode=sglang:d4+fsdp:d4")
# Qwen2.5 of 1.5, 7 and 32 billion: width, layers, heads, key/value heads, feed-forward, vocabulary, tied head
SHAPES = {
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
}


def model(name: str) -> Any:
    hidden, layers, heads, groups, intermediate, vocabulary, tied = SHAPES[name]
    with torch.device("meta"):
        return Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=vocabulary,
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=groups,
                tie_word_embeddings=tied,
            )
        )


def footprint(name: str, ranks: int, tensor: int = 1, *settings: str) -> Footprint:
    return Footprint.of(model(name), small_config(*SERVED, "model.dtype=bfloat16", *settings), ranks, tensor)


@pytest.mark.parametrize(
    ("name", "ranks", "free", "kind", "says"),
    [
        ("1.5B", 1, 79, None, ""),
        ("7B", 2, 79, None, ""),
        (
            "7B",
            1,
            79,
            UserError,
            r"7\.62 billion parameters on 1 GPUs takes at least 127\.\d GiB of each, and of 80",
        ),
        ("32B", 4, 79, UserError, r"32\.76 billion parameters on 4 GPUs takes at least 12\d\.\d GiB of each"),
        ("32B", 8, 79, None, ""),  # a rank loads what it keeps: 15 GiB of weights, not 122
        ("1.5B", 1, 12, RunError, r"2\d\.\d GiB of each, and of 80\.0 GiB only 12\.0 are free: end what else uses"),
    ],
)
def test_what_cannot_fit_is_said_before(
    name: str, ranks: int, free: int, kind: type[UserError] | None, says: str
) -> None:
    problem = room_problem(footprint(name, ranks), free * GIB, 80 * GIB)
    assert (None if problem is None else type(problem)) is kind
    if problem is not None:
        with pytest.raises(UserError, match=says):
            raise problem


def test_what_a_rank_holds() -> None:
    parameters = footprint("7B", 1).parameters
    assert parameters == 7_615_616_512
    assert footprint("7B", 8).loaded == 4 * parameters // 8
    # A reference is another share in bfloat16, and what samples in the trainer's process is all of the model.
    assert footprint("7B", 8, 1, "algorithm.kl_coef=0.1").loaded == 6 * parameters // 8
    own = small_config("model.dtype=bfloat16")
    assert own.engine == "embedded"
    assert Footprint.of(model("7B"), own, 8).loaded == 4 * parameters // 8 + 2 * parameters
    # Ranks that share a layer have all of embedding and head: less is shared out.
    assert 4 * parameters // 8 < footprint("7B", 8, 4).loaded < 4 * parameters // 2
    # Beside its share, a step needs embedding, head and a layer whole, to compute with.
    step = footprint("7B", 8)
    assert 16 * parameters // 8 + 2 * 1_090_000_000 < step.trained < 16 * parameters // 8 + 2 * 1_400_000_000


def test_a_server_that_gives_its_memory_away_is_not_in_the_way() -> None:
    one = footprint("1.5B", 1)
    assert room_problem(one, 12 * GIB, 80 * GIB, shared=True) is None
    assert room_problem(one, 5 * GIB, 80 * GIB, shared=True) is not None


def test_memory_that_ran_out_is_told_in_one_line() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
    assert str(out_of_memory(error)).startswith(
        "a GPU ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB): end what else uses it"
    )


@pytest.mark.parametrize(
    ("ranks", "tokens", "kind", "says"),
    [
        (8, 28_672, "full", ""),
        (8, 131_072, "full", r"131,072 tokens, .* at least 41\.\d GiB of a GPU beside the 16\.\d .*: set "
         r"model\.gradient_checkpointing=chunked, or lower"),
        (8, 131_072, "chunked", ""),
        (8, 400_000, "chunked", r"model\.gradient_checkpointing=offloaded"),
        (8, 400_000, "offloaded", ""),
        (8, 4_000_000, "offloaded", r"there are 50\.0: lower the agent's limits"),
    ],
)  # fmt: skip
def test_rows_that_can_never_fit_are_told_before_the_first_step(ranks: int, tokens: int, kind: str, says: str) -> None:
    lm, config = model("7B"), small_config("model.dtype=bfloat16", f"model.gradient_checkpointing={kind}")

    problem = row_problem(footprint("7B", ranks), tokens, row_bytes(lm.config, config, tokens), 50 * GIB, config)

    assert (problem is None) is (not says)
    if problem is not None:
        with pytest.raises(UserError, match=says):
            raise problem


class Mesh(dict[str, Any]):
    """Sizes of a mesh of ranks that are not there."""

    mesh_dim_names = ("replica", "data", "tensor")

    def __missing__(self, name: str) -> Any:
        sizes = {"replica": 4, "data": 8, "tensor": 1}
        return SimpleNamespace(size=lambda: sizes[name])


def test_a_replica_has_the_memory_of_its_own_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    config = small_config("model.dtype=bfloat16", "model.gradient_checkpointing=full", *SERVED)
    lm, world = model("32B"), World(0, 32, torch.device("cuda"), cast(Any, Mesh()))

    require_room(lm, config, world)
    require_row_room(lm, config, world, 4_096)
    with pytest.raises(UserError, match=r"more training GPUs \(or a larger s\)"):
        require_row_room(lm, config, world, 32_768)
    assert row_problem(footprint("32B", 32), 32_768, row_bytes(lm.config, config, 32_768), 80 * GIB, config) is None
