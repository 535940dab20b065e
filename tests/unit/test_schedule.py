"""Steps, epochs, learning rates and due dates: plain arithmetic that a resumed run repeats."""

from __future__ import annotations

import pytest
from builders import small_config
from hypothesis import given
from hypothesis import strategies as st

from trainer.config_parts import CheckpointConfig
from trainer.errors import UserError
from trainer.schedule import Schedule, recover_due, save_due, seconds_to_first_save, warning_of_late_save
from trainer.train.learner import learning_rate


def course(train_size: int, *overrides: str) -> Schedule:
    return Schedule.of(small_config("train.total_steps=0", *overrides), train_size)


def test_incomplete_batches_are_left_out_of_an_epoch() -> None:
    found = course(11, "train.total_epochs=3")  # batches of four

    assert (found.steps_per_epoch, found.total_steps, found.epochs) == (2, 6, 3)
    assert [found.first_task(step) for step in range(1, 7)] == [0, 4, 11, 15, 22, 26]


@given(st.integers(1, 9), st.integers(1, 60), st.integers(1, 4))
def test_no_task_is_trained_twice_in_an_epoch(batch: int, extra: int, epochs: int) -> None:
    size = batch + extra
    found = course(size, f"rollout.batch_size={batch}", f"train.total_epochs={epochs}")
    seen = [
        i
        for step in range(1, found.total_steps + 1)
        for i in range(found.first_task(step), found.first_task(step) + batch)
    ]

    assert len(set(seen)) == len(seen) == epochs * (size // batch) * batch
    for step in range(1, found.total_steps + 1):
        first, last = found.first_task(step), found.first_task(step) + batch - 1
        assert first // size == last // size == found.position(step)["epoch"] - 1


def test_fewer_tasks_than_a_batch_are_refused() -> None:
    assert course(4).steps_per_epoch == 1
    with pytest.raises(UserError, match=r"rollout\.batch_size=4 is larger than the number of training tasks, 3: lower"):
        course(3)


def test_total_steps_decide_over_epochs() -> None:
    found = course(11, "train.total_steps=5", "train.total_epochs=9")

    assert (found.total_steps, found.epochs) == (5, 3)
    assert found.position(5) == {
        "epoch": 3,
        "epochs": 3,
        "epoch_step": 1,
        "steps_per_epoch": 2,
        "global_step": 5,
        "total_steps": 5,
    }
    assert [found.ends_epoch(step) for step in range(1, 6)] == [False, True, False, True, False]


@pytest.mark.parametrize(
    ("step", "seconds", "have_one", "due"),
    [
        (1, 1e9, False, False),  # not before the second step, however long the first took
        (2, 0, False, True),
        (3, 0, False, True),
        (3, 600, True, False),
        (3, 601, True, True),
        (2, 1, True, False),
    ],
)
def test_recover_checkpoints_come_after_the_second_step_and_then_by_time(
    step: int, seconds: float, have_one: bool, due: bool
) -> None:
    assert recover_due(CheckpointConfig(), step, seconds, have_one) is due


def test_recover_checkpoints_by_steps_come_beside_those_by_time() -> None:
    c = CheckpointConfig(ckpt_freq_steps=3, ckpt_first_step=5)

    assert [step for step in range(1, 10) if recover_due(c, step, 0, have_one=step > 3)] == [3, 6, 9]


def saves(*, seconds: float = 0, **settings: float) -> list[int]:
    c = CheckpointConfig.model_validate({"save_freq_epochs": 0, **settings})
    found = Schedule(steps_per_epoch=3, total_steps=10, train_size=12, batch_size=4)
    return [step for step in range(1, 11) if save_due(c, found, step, seconds)]


def test_persistent_checkpoints_by_steps_epochs_and_seconds() -> None:
    assert saves() == [10]  # the last step always
    assert saves(save_freq_steps=4) == [4, 8, 10]
    assert saves(save_freq_epochs=1) == [3, 6, 9, 10]
    assert saves(save_freq_epochs=2) == [6, 10]
    assert saves(save_freq_epochs=2, save_freq_steps=4) == [4, 6, 8, 10]
    assert saves(save_freq_secs=60, seconds=60) == [10]
    assert saves(save_freq_secs=60, seconds=61) == [*range(1, 11)]


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({"save_freq_epochs": 0}, 1000),
        ({"save_freq_epochs": 1}, 300),
        ({"save_freq_epochs": 1, "save_freq_steps": 2}, 200),
        ({"save_freq_epochs": 1, "save_freq_secs": 50}, 150),
        ({"save_freq_epochs": 1, "save_freq_secs": 5000}, 300),
    ],
)
def test_the_first_persistent_checkpoint_is_foretold(settings: dict[str, float], seconds: float) -> None:
    found = Schedule(steps_per_epoch=3, total_steps=10, train_size=12, batch_size=4)

    assert seconds_to_first_save(CheckpointConfig.model_validate(settings), found, 100) == seconds


def rates(schedule: str, warmup: int = 4, total: int = 12, floor: float = 0.1) -> list[float]:
    config = small_config(
        "train.learning_rate=1.0",
        f"train.schedule={schedule}",
        f"train.warmup_steps={warmup}",
        f"train.min_lr_ratio={floor}",
    )
    return [learning_rate(step, total, config) for step in range(total + 2)]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_warms_up_in_even_steps(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates(schedule, warmup=0)[0] == 1.0


def test_the_learning_rate_after_the_warm_up() -> None:
    assert rates("constant")[4:] == [1.0] * 10
    # Eight steps from 1 to 0.1, and no further.
    assert rates("linear")[4:] == pytest.approx([1 - 0.9 * done / 8 for done in range(9)] + [0.1])
    assert rates("cosine")[8] == pytest.approx(0.55)
    assert rates("cosine")[12:] == pytest.approx([0.1, 0.1])
    assert sorted(rates("cosine")[4:], reverse=True) == rates("cosine")[4:]
    assert rates("cosine")[5] > rates("linear")[5]


def test_a_warm_up_longer_than_the_run() -> None:
    assert rates("cosine", warmup=100, total=3)[:3] == pytest.approx([0.01, 0.02, 0.03])


def test_a_late_first_save_is_warned_of() -> None:
    found, checkpoint = Schedule(19, 19, 4 * 19, 4), CheckpointConfig()
    assert warning_of_late_save(checkpoint, found, 60) == ""
    warning = warning_of_late_save(checkpoint, found, 2200)
    assert "after 12 hours" in warning
    assert "checkpoint.save_freq_steps or checkpoint.save_freq_secs" in warning
