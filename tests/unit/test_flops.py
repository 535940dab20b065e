"""FLOPs of training by the formula, counted by PyTorch itself, and what a step says of its speed."""

from __future__ import annotations

import pytest
import torch
from builders import grouped_query_lm, learner, sampled_rows, small_config, small_parts
from families import KINDS, make
from torch.utils.flop_counter import FlopCounterMode

from trainer.train import learner as learner_module
from trainer.train.flops import ModelFlops, Work, peak_of


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_the_formula_is_what_the_matrix_products_of_a_step_add_up_to(model: str) -> None:
    lm = small_parts().lm if model == "llama" else grouped_query_lm()
    rows = sampled_rows(lm, 1, lm.config.vocab_size)
    one = learner(lm, small_config())

    with FlopCounterMode(display=False) as counter:
        work = one.step(rows).work

    counted = counter.get_flop_counts()["Global"]
    products = sum(value for op, value in counted.items() if "attention" not in str(op))
    length, trained = rows[0].num_tokens, len(rows[0].response_ids)
    assert work.tokens == length
    assert products == one.flops.training(length, trained, 0)
    attention = work.flops - products
    heads, size = lm.config.num_attention_heads, lm.config.hidden_size // lm.config.num_attention_heads
    assert attention == 6 * lm.config.num_hidden_layers * heads * size * length**2


def test_attention_through_a_window_counts_the_keys_that_it_sees() -> None:
    flops = ModelFlops.of(make(*KINDS["qwen2_window"]))  # one layer without a window, two with 8 keys
    assert flops.windows == ((None, 1), (8, 2))

    def seen(length: int, window: int) -> int:
        return sum(min(position + 1, window) for position in range(length))

    for length in (3, 8, 50):
        twice = 2 * (seen(length, length) + 2 * seen(length, 8)) / 3
        assert flops.squares([(0, length)]) == pytest.approx(twice, abs=length)  # the diagonal is counted by halves
    assert flops.squares([(0, 3), (3, 50)]) == flops.squares([(0, 50)])  # a prefix and what follows it


def test_the_sizes_of_a_known_model() -> None:
    lm = grouped_query_lm()
    flops = ModelFlops.of(lm)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
    assert (flops.body, flops.head, flops.attention) == (2 * layer, 97 * 64, 2 * 4 * 16)


def test_speed_over_the_optimizer_steps_of_a_training_step() -> None:
    one, other = (
        Work(2.0, 1000, 4e12, 3 << 30, 4000, 16e12, 2, 300, 90),
        Work(3.0, 500, 2e12, 2 << 30, 2000, 8e12, 1, 0, 80),
    )
    both = one + other

    shared = {"train_tokens_per_s": 300.0, "train_row_tokens_per_s": 1200.0, "train_shared": 0.75}
    memory = {"gpu_memory_peak_gib": 3.0, "gpu_alloc_retries": 3.0}
    groups = {"train_repeated": pytest.approx(0.2), "train_group_tokens": 90.0}
    assert both.numbers(2, 1e12) == {**shared, **groups, "mfu": 0.6, "mfu_of_rows": 2.4, **memory}
    whole = {"train_tokens_per_s": 10.0, "train_row_tokens_per_s": 10.0, "train_shared": 0.0}
    assert Work(1.0, 10, 5.0, 0, 10, 5.0).numbers(1, None) == whole
    assert Work().numbers(1, 1e12) == {}


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_is_told_by_name(name: str, tera: float | None) -> None:
    assert peak_of(name) == (None if tera is None else pytest.approx(tera * 1e12))


def test_rows_that_are_the_same_are_computed_once_and_counted_once() -> None:
    lm = grouped_query_lm()
    (row,) = sampled_rows(lm, 1, lm.config.vocab_size)

    work = learner(lm, small_config()).step([row, row, row]).work

    assert work.tokens == row.num_tokens
    assert work.peak_bytes == (0 if not torch.cuda.is_available() else work.peak_bytes)


def test_a_step_tells_the_most_memory_and_how_often_it_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = grouped_query_lm()
    (row,) = sampled_rows(lm, 1, lm.config.vocab_size)
    readings = iter([(9 << 30, 5), (7 << 30, 8)])  # what a GPU's allocator would say before and after
    monkeypatch.setattr(learner_module, "gpu_memory", lambda _: next(readings))

    work = learner(lm, small_config()).step([row]).work

    assert (work.peak_bytes, work.retries) == (7 << 30, 3)
