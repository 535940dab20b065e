"""What AReaL's logs of three generations, and ours, say: every number, whatever is wrapped around it."""

from __future__ import annotations

import ast
import math
import re
from datetime import datetime
from pathlib import Path

import pytest
from areal_lines import (
    BEGIN,
    grid,
    lite,
    lite_step,
    master,
    through_ray,
    v2_stats,
    v2_step,
    v2_steps,
    v3_step,
)

from clusterkit.runs.diagnose.run import diagnose_log
from clusterkit.runs.log.lines import KEYWORDS, interesting
from clusterkit.runs.log.progress import LogHistory
from clusterkit.runs.log.reader import read_log
from clusterkit.runs.log.scan import LogScanner
from clusterkit.runs.log.text import log_lines
from clusterkit.runs.log.view import LogView
from trainer.metrics import epoch_line, stats_line

SAMPLE = Path(__file__).parents[1] / "cases" / "runlog" / "areal_v0.2_master_worker.log"
START = BEGIN.timestamp()


def told(text: str) -> LogHistory:
    scanner = LogScanner()
    scanner.feed(text.encode())
    return scanner.history


def view_of(text: str, tmp_path: Path) -> LogView:
    (tmp_path / "main.log").write_text(text)
    return read_log(tmp_path / "main.log")


def test_all_18_lines_of_areals_own_sample_are_understood_exactly() -> None:
    lines = SAMPLE.read_text().splitlines()
    view = read_log(SAMPLE)
    history = view.history

    assert len(lines) == 18
    assert [step["global_step"] for step in history.steps] == [1, 2, 3, 4, 5, 6]
    expected = [2124.429, 2405.716, 2122.318, 2313.134, 2296.076, 2299.448]
    assert [step["step_time_s"] for step in history.steps] == expected
    assert [step["total_time_s"] for step in history.steps][-1] == 13720.729
    assert [step.get("remaining_s") for step in history.steps] == [None, None, 33957.093, 33265.891, 31413.8, 29350.673]
    assert {step["tokens"] for step in history.steps} == {111847.0}
    # The sample was gathered by grep: all steps, then all statistics, then all dumps.
    dicts = [ast.literal_eval(line[line.index("{") :]) for line in lines if "returns {" in line]
    assert [step["stats"] for step in history.steps] == dicts
    assert history.recover_count == 6
    # The last dump is half an hour younger than the last step that is told.
    assert [record["global_step"] for record in history.recovers] == [2, 3, 4, 5, 6, None]
    assert history.recovers[-1]["time"] == datetime(2025, 2, 22, 14, 59, 44, 925000).timestamp()
    assert (history.attempt, history.total_steps, view.dialect) == (1, 19, "AReaL v0.2")


def test_json_of_the_sample() -> None:
    facts = read_log(SAMPLE).as_dict()

    progress = facts["progress"]
    assert {name: progress[name] for name in ("epoch", "epochs", "step", "steps", "global_step")} == {
        "epoch": 1,
        "epochs": 1,
        "step": 6,
        "steps": 19,
        "global_step": 6,
    }
    assert progress["step_time_s"] == pytest.approx(2297.762)
    assert 12 * 2297 < progress["eta_s"] <= 13 * 2298
    assert facts["stats"]["importance_weight"] == 1.0000001192092896
    assert facts["history"]["task_reward"][0] == -0.2996826171875
    assert len(facts["history"]["no_eos_ratio"]) == 6
    assert facts["recover"]["count"] == 6
    assert [event["kind"] for event in facts["events"]] == ["recover"] * 6


def test_v3_has_a_table_a_minibatch_and_its_names_are_translated(tmp_path: Path) -> None:
    head = "RPC name actor_train returns"
    tables = [{"ppo_actor/task_reward/avg": -0.5 + n, "ppo_actor/no_eos_ratios/avg": 0.25, "lr": 1e-5} for n in (0, 1)]
    text = "".join(master(f"{head} ({n}/2)\n{grid(tables[n - 1])}".rstrip("\n"), 99.0) for n in (1, 2))

    view = view_of(text + v3_step(1, 100.0), tmp_path)

    (step,) = view.history.steps
    assert step["stats"] == pytest.approx({"task_reward": 0.0, "no_eos_ratio": 0.25, "lr": 1e-5})
    assert (step["step_time_s"], view.dialect) == (100.0, "AReaL v0.3")


def test_a_single_table_of_v3_has_no_number() -> None:
    values = {f"ppo_actor/value_{n}/avg": float(n) for n in range(11)}
    text = master("RPC name actor_train returns\n" + grid(values).rstrip("\n"), 99.0)

    assert told(text + v3_step(1, 100.0)).stat("value_10") == [10.0]


def test_lite_tells_the_step_first_and_the_time_only_by_stamps_and_timers(tmp_path: Path) -> None:
    values = {"ppo_actor/task_reward/avg": 0.25, "ppo_actor/seq_len/avg": 812.0, "ppo_actor/seq_len/max": 4096.0}
    values |= {"timeperf/rollout": 60.0, "timeperf/train_step": 30.0}
    text = lite_step(1, 100.0, values) + lite_step(2, 220.0, values)

    view = view_of(text, tmp_path)

    assert [step["step_time_s"] for step in view.history.steps] == [90.0, 120.0]
    assert view.history.steps[1]["stats"]["avg_seq_len"] == 812.0
    assert view.history.steps[1]["stats"]["seq_len/max"] == 4096.0
    assert view.history.time_split() == {"rollout": 120.0, "train_step": 60.0}
    assert (view.dialect, view.history.total_steps) == ("AReaL Lite/1.x", 50)


def test_lite_dumps_before_it_says_that_the_step_is_done() -> None:
    saved = lite("Saved recover checkpoint to /s/actor/recover_checkpoint (with_optim=True)", 99.0, "recover")
    history = told(lite_step(1, 50.0, {"lr": 1.0}) + saved + saved.replace("actor", "critic") + lite_step(2, 100.0, {}))

    assert history.recover_count == 1
    assert history.recovers[0]["global_step"] == 2


def test_lite_ends_and_goes_on() -> None:
    resumed = lite(
        "Recovering from StepInfo(epoch=0, epoch_step=2, global_step=2, steps_per_epoch=50).", 500.0, "recover"
    )
    text = "".join(lite_step(n, 100.0 * n, {"rollout/reward": n / 10}) for n in (1, 2, 3)) + resumed
    history = told(
        text + lite_step(3, 600.0, {"rollout/reward": 0.9}) + lite("Training completes! Total time 5", 601.0)
    )

    assert history.stat("rollout/reward") == [0.1, 0.2, 0.9]
    assert (history.attempt, history.attempts[-1]["resume_step"]) == (2, 2)
    assert history.finish is not None


def test_our_own_log(tmp_path: Path) -> None:
    text = master("Evaluation before (4 chunks): accuracy 0.2656 on 128 tasks.", 0.0)
    for n in range(1, 6):
        at = {"epoch": 1, "epochs": 1, "epoch_step": n, "steps_per_epoch": 2048, "global_step": n}
        text += master(stats_line({"task_reward": n / 10, "zero_variance_groups": 0.0, "n_tokens": 10.0}), 2.0 * n)
        text += master(epoch_line(at, 10, 2.0, 2.0 * n, (30 - n) * 2.0 if n > 2 else None), 2.0 * n)
    text += master("Model actor saved at /r/actor/epoch1epochstep5globalstep5. Time consumption: 0.0413 s.", 10.1)
    text += master("Dumped recover info to file.", 10.2)

    view = view_of(text, tmp_path)

    assert view.dialect == "clusterkit"
    assert view.history.total_steps == 30  # fewer than the epoch has: told by the estimate alone
    assert view.history.evals[0]["accuracy"] == 0.2656
    assert (view.history.saves[0]["path"], view.history.saves[0]["global_step"]) == (
        "/r/actor/epoch1epochstep5globalstep5",
        5,
    )
    assert view.history.recovers[0]["global_step"] == 5


@pytest.mark.parametrize(
    ("line", "state", "message"),
    [
        (master("Experiment Completes! Yeah!!!!!!!!", 200.0), "finished", ""),
        (master("\x1b[0m\x1b[33m\x1b[1mExperiment Completes! Yeah!!!!!!!!\x1b[0m", 200.0), "finished", ""),
        (master("interrupted after step 1: a recover checkpoint of step 1 is written", 200.0), "interrupted", "step 1"),
        (master("CUDA out of memory", 200.0, "ERROR"), "failed", "CUDA out of memory"),
    ],
)
def test_how_a_run_ended_until_it_goes_on(tmp_path: Path, line: str, state: str, message: str) -> None:
    view = view_of(v2_steps(1, 1) + line, tmp_path)
    again = told(v2_steps(1, 1) + line + v2_steps(2, 2, at=300.0))

    assert view.state == state
    assert message in view.message
    assert view.eta is None
    assert again.finish is None
    assert again.failure is None


def test_colours_and_rays_prefixes_change_nothing() -> None:
    plain = v2_steps(1, 3) + master("Dumped recover info to file.", 300.1)
    coloured = "".join(f"\x1b[32m{line}\x1b[0m\n" for line in plain.splitlines())

    expected = told(plain)
    for text in (coloured, through_ray(plain), through_ray(coloured, "master_worker/0"), plain.replace("\n", "\r\n")):
        history = told(text)
        assert history.steps == expected.steps
        assert history.recovers == expected.recovers


def test_tables_survive_rays_prefixes_and_what_others_print_between_their_rows() -> None:
    values = {f"ppo_actor/v{n}/avg": n / 4 for n in range(10)}
    table = through_ray(master("RPC name actor_train returns (1/1)\n" + grid(values).rstrip("\n"), 99.0)).splitlines(
        True
    )
    noise = "(generation_server/3 pid=7) [2025-06-01 12:00:00] Decode batch, #running-req: 8\n"
    # Ray folds lines that it has printed before: the rules between the rows are alike.
    folded = [line for line in table if "├" not in line and "╘" not in line]

    history = told(noise.join(folded) + through_ray(v3_step(1, 100.0)))

    assert history.steps[0]["stats"] == {f"v{n}": n / 4 for n in range(10)}


def test_rays_note_on_repetitions_is_no_part_of_a_message() -> None:
    note = " \x1b[32m [repeated 3x across cluster]\x1b[0m"
    text = through_ray(
        v2_stats(99.0, task_reward=0.5) + v2_step(1, 100.0) + master("Dumped recover info to file.", 100.1)
    )
    noted = "".join(f"{line}{note}\n" for line in text.splitlines())

    history = told(noted)

    assert history.steps[0]["stats"] == {"task_reward": 0.5}
    assert (history.recover_count, history.recovers[0]["global_step"]) == (1, 1)


def test_numbers_that_are_none_stay_apart_from_those_that_are_missing() -> None:
    stats = "{'a': nan, 'b': inf, 'c': -inf, 'd': 1e-07, 'e': None, 'f': np.float32(2.5), 'g': 3, 'h': 'x'}"
    history = told(master(f"RPC name actor_train returns {stats}", 99.0) + v2_step(1, 100.0))

    values = history.steps[0]["stats"]
    assert math.isnan(values["a"])
    assert {name: values[name] for name in values if name != "a"} == {
        "b": math.inf,
        "c": -math.inf,
        "d": 1e-07,
        "f": 2.5,
        "g": 3.0,
    }


def test_statistics_of_other_parts_are_passed_over() -> None:
    history = told(master("RPC name critic_train returns {'loss': 1.0}", 98.0) + v2_steps(1, 1))

    assert history.steps[0]["stats"] == {"task_reward": 0.01}


def test_where_the_time_of_a_step_goes_in_v2() -> None:
    times = [("actor_gen", 90.0), ("rew_inf", 4.5), ("actor_train", 5.5)]
    text = "".join(master(f"Model rpc {name} finished. Run time {s:.4f}s.", 50.0) for name, s in times)

    assert told(text + v2_steps(1, 1)).time_split() == dict(times)


def test_half_a_line_of_a_killed_writer_costs_only_itself() -> None:
    whole = v2_steps(1, 1) + v2_stats(199.0, task_reward=0.75)
    torn = v2_step(2, 200.0)[:70]
    stats = v2_stats(299.0, task_reward=0.5)[:90].rstrip("\n")  # ends within the number

    history = told(whole + torn + v2_step(2, 250.0) + stats + v2_stats(300.0, task_reward=0.25) + v2_step(3, 301.0))

    assert [step["global_step"] for step in history.steps] == [1, 2, 3]
    assert history.stat("task_reward") == [0.01, 0.75, 0.25]


def test_stamps_that_are_no_times_are_passed_over() -> None:
    (step,) = told(re.sub(r"^\d+-", "20251399-", v2_step(1, 0.0))).steps

    assert step["time"] is None


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_the_keywords_that_grep_is_given_are_those_that_choose_lines(keyword: str) -> None:
    line = f"noise INFO: Model a{keyword}b\n" if keyword == " saved at " else f"noise {keyword}\n"

    assert interesting(line.encode(), len(line))


GRPO = {
    "task_reward/avg": 0.45,
    "final_reward/avg": 0.44,
    "seq_len/avg": 812.0,
    "prompt_len/avg": 96.0,
    "no_eos_ratios/avg": 0.125,
    "clip_ratio/avg": 0.002,
    "importance_weight/avg": 1.25,
    "approx_kl/avg": 0.003,
    "loss/avg": 0.75,
}
"""Numbers of AReaL v0.3.4's examples, which choose the scope that is written before them."""


@pytest.mark.parametrize("scope", ["grpo_actor", "ppo_actor", "my_own_actor", "actor"])
@pytest.mark.parametrize("update", ["", "update/"])
def test_the_numbers_of_any_actor_have_v2s_names(tmp_path: Path, scope: str, update: str) -> None:
    learned = ("clip_ratio", "importance_weight", "approx_kl", "loss")
    values = {f"{scope}/{update if name.startswith(learned) else ''}{name}": number for name, number in GRPO.items()}
    view = view_of(lite_step(1, 100.0, {**values, "rollout/reward": 0.46, "ppo_critic/loss/avg": 3.0}), tmp_path)

    assert view.history.steps[0]["stats"] == {
        "task_reward": 0.45,
        "final_reward": 0.44,
        "avg_seq_len": 812.0,
        "avg_prompt_len": 96.0,
        "no_eos_ratio": 0.125,
        "actor_clip_ratio": 0.002,
        "importance_weight": 1.25,
        "ppo_approx_kl": 0.003,
        "actor_loss": 0.75,
        "rollout/reward": 0.46,
        "ppo_critic/loss": 3.0,
    }
    shown = "\n".join(log_lines(view))
    assert re.search(r"^task_reward +0\.450 ", shown, re.MULTILINE)
    assert re.search(r"^rollout/reward +0\.460 ", shown, re.MULTILINE)
    assert "importance_weight 1.250000, actor_clip_ratio 2.00e-03" in shown


def test_what_is_another_number_is_not_shown_as_the_reward_of_the_task(tmp_path: Path) -> None:
    several = {"red_actor/task_reward/avg": 0.1, "blue_actor/task_reward/avg": 0.9}
    values = {"rollout/reward": 0.46, "eval-rollout/reward": 0.5, "loss/avg": 2.0, **several}
    view = view_of(lite_step(1, 100.0, values), tmp_path)

    (step,) = view.history.steps
    own = {"red_actor/task_reward": 0.1, "blue_actor/task_reward": 0.9, "loss": 2.0}
    assert step["stats"] == {"rollout/reward": 0.46, "eval-rollout/reward": 0.5, **own}
    assert "task_reward" not in view.as_dict()["history"]
    assert not re.search(r"^task_reward", "\n".join(log_lines(view)), re.MULTILINE)


@pytest.mark.parametrize("length", [3, 60])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dialect", ["v0.2", "v0.3", "lite", "rollout"])
def test_a_reward_that_is_no_number_is_diagnosed_in_every_dialect(
    tmp_path: Path, dialect: str, bad: float, length: int
) -> None:
    log = tmp_path / "main.log"
    text = ""
    for n in range(1, length + 1):
        reward = bad if n >= length - 1 else n / 100
        if dialect == "v0.2":
            text += v2_stats(100.0 * n - 1, task_reward=reward, actor_loss=0.1) + v2_step(n, 100.0 * n)
        elif dialect == "v0.3":
            table = grid({"ppo_actor/task_reward/avg": reward, "ppo_actor/loss/avg": 0.1}).rstrip("\n")
            text += master(f"RPC name actor_train returns\n{table}", 100.0 * n - 1) + v3_step(n, 100.0 * n)
        else:
            name = "rollout/reward" if dialect == "rollout" else "grpo_actor/task_reward/avg"
            text += lite_step(n, 100.0 * n, {name: reward, "grpo_actor/loss/avg": 0.1})
    log.write_text(text)

    [finding] = [finding for finding in diagnose_log(log).findings if finding.id != "stale-recover"]

    assert (finding.id, finding.title) == ("nan-loss", "A reward is not a number")
    assert finding.changes == ()  # the learning rate is not at fault
    assert str(bad) in finding.evidence[0].text
