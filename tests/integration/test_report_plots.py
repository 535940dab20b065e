"""The plots of a run's page in a real browser: cursor, zoom, smoothing, scales, downloads, several runs."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from reportpage import write_report
from run_writer import RunWriter

from clusterkit.observe.report.dashboard import Dashboard, Views


@pytest.fixture
def powers(tmp_path: Path) -> Any:
    """Three runs of 20 steps: a number that grows tenfold with every fifth step, equal ones, a constant 0."""
    runs = []
    for number in (1, 2, 3):
        writer = RunWriter(tmp_path, trial=f"run{number}").config(f"seed={number}").attempt(total_steps=20)
        for step in range(1, 21):
            reward = number * step / 100
            stats = {"task_reward": reward, "final_reward": reward, "grad_norm": 10 ** (step / 5), "kl_reward": 0.0,
                     "entropy": number + step, "=cmd": 1.0}  # fmt: skip
            writer.record("step", global_step=step, stats=stats)
        runs.append(writer.run)
    return lambda count: write_report(tmp_path, *runs[:count])


def _plot(shown: Any, title: str) -> Any:
    return shown.page.locator("figure").filter(has=shown.page.get_by_role("heading", name=re.compile(rf"^{title}\b")))


def _focus(shown: Any, title: str) -> None:
    """Focus a plot, which is drawn once it is in sight."""
    _plot(shown, title).scroll_into_view_if_needed()
    _plot(shown, title).locator(".u-over").wait_for()
    _plot(shown, title).locator(".plot").focus()


def _at(shown: Any, title: str, step: int, steps: int = 20) -> None:
    """Point at a step, of plots that show the steps 1 to `steps`."""
    _plot(shown, title).scroll_into_view_if_needed()
    over = _plot(shown, title).locator(".u-over")
    over.hover(position={"x": (step - 1) / (steps - 1) * (over.bounding_box()["width"] - 1), "y": 80})


def _value(shown: Any, title: str) -> str:
    """What the legend of a plot shows."""
    return str(_plot(shown, title).locator(".u-legend").inner_text()).replace("\n", " ").replace("\t", " ")


def _height(shown: Any, title: str) -> float:
    """Where the value that is pointed at stands, as a share of the plot from below."""
    point, frame = (_plot(shown, title).locator(one).first.bounding_box() for one in (".u-cursor-pt", ".u-over"))
    return float(1 - (point["y"] + point["height"] / 2 - frame["y"]) / frame["height"])


def test_every_plot_shows_its_values_at_the_cursor_and_the_latest_without_one(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))

    assert "task_reward = final_reward 0.2" in _value(shown, "Reward")  # equal ones do not hide one another
    _at(shown, "Reward", 7)
    assert "task_reward = final_reward 0.07" in _value(shown, "Reward")
    assert _value(shown, "Entropy").endswith("entropy 8")
    assert _value(shown, "Gradient norm").endswith("grad_norm 25.119")
    shown.page.mouse.move(1, 1)
    assert "0.2" in _value(shown, "Reward")

    _at(shown, "KL", 7)
    assert _height(shown, "KL") == pytest.approx(0, abs=0.02)  # a constant 0 stands on its axis
    assert shown.said == []


def test_dragging_zooms_into_steps_in_all_plots_and_a_double_click_shows_all(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))
    reward = _plot(shown, "Reward").locator(".u-over")
    box = reward.bounding_box()
    ends = [shown.page.locator(name) for name in ("#from", "#to")]
    assert [end.input_value() for end in ends] == ["1", "20"]

    for step, act in ((4.6, shown.page.mouse.down), (10.4, shown.page.mouse.up)):
        shown.page.mouse.move(box["x"] + (step - 1) / 19 * box["width"], box["y"] + 60)
        act()
    assert [end.input_value() for end in ends] == ["5", "10"]
    for key, step in (("ArrowRight", 5), ("ArrowLeft", 10)):
        _focus(shown, "Entropy")
        shown.page.keyboard.press(key)
        assert shown.tip().startswith(f"step {step}\n")
        shown.page.keyboard.press("Escape")

    reward.dblclick()
    assert [end.input_value() for end in ends] == ["1", "20"]
    ends[0].fill("12")
    ends[1].fill("14")
    ends[1].press("Enter")
    _focus(shown, "Reward")
    shown.page.keyboard.press("ArrowRight")
    assert shown.tip().startswith("step 12\n")
    shown.page.get_by_role("button", name="All steps").click()
    assert [end.input_value() for end in ends] == ["1", "20"]
    assert shown.said == []


def test_smoothing_is_tensorboards_and_tells_the_value_itself_too(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))
    total = weight = 0.0
    for step in range(1, 21):
        total, weight = 0.9 * total + 0.1 * (1 + step), 0.9 * weight + 0.1

    shown.page.locator("#smooth").fill("0.9")
    _plot(shown, "Entropy").get_by_text(f"{total / weight:.5g}").wait_for()
    _at(shown, "Entropy", 20)
    assert f"entropy: {total / weight:.5g} (raw 21)" in shown.tip()
    assert shown.said == []


def test_a_log_scale_shows_powers_at_equal_distances(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))
    shown.page.get_by_label("Log scale").check()
    heights = []
    for step in (5, 10, 15, 20):
        _at(shown, "Gradient norm", step)
        heights.append(_height(shown, "Gradient norm"))

    apart = [after - before for before, after in pairwise(heights)]
    assert min(apart) > 0.1
    assert max(apart) - min(apart) < 0.02
    assert "No run" not in _plot(shown, "KL").inner_text()  # 0 has no logarithm, and harms nothing
    assert shown.said == []


def _download(shown: Any, button: Any) -> list[dict[str, str]]:
    with shown.page.expect_download() as waiting:
        button.click()
    assert waiting.value.suggested_filename.endswith(".csv")
    return list(csv.DictReader(io.StringIO(Path(waiting.value.path()).read_text())))


def test_values_are_downloaded_as_csv(screen: Any, powers: Any) -> None:
    shown = screen(powers(2))

    rows = _download(shown, _plot(shown, "Reward").get_by_role("button", name="CSV"))
    assert list(rows[0]) == ["run", "first_step", "last_step", "task_reward", "final_reward"]
    assert [(row["run"], row["first_step"], float(row["task_reward"])) for row in rows] == [
        (f"run{run}", str(step), run * step / 100) for run in (1, 2) for step in range(1, 21)
    ]

    rows = _download(shown, shown.page.get_by_role("button", name="All values as CSV"))
    assert len(rows) == 40
    assert {"entropy", "grad_norm", "'=cmd"} <= set(rows[0])  # no formula of a spreadsheet
    assert shown.said == []


def test_any_number_is_plotted_by_its_name_and_stays_after_a_reload(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))
    field = shown.page.get_by_label("Numbers to plot")
    assert "entropy" in shown.page.locator("#names option").evaluate_all("all => all.map((one) => one.value)")

    field.fill("nothing_like_it")
    field.press("Enter")
    assert field.evaluate("one => one.validationMessage").startswith("No number has this name")
    assert shown.page.locator("#added figure").count() == 0
    field.fill("entropy, grad_*")
    field.press("Enter")
    assert _value(shown, "entropy, grad_norm").endswith("entropy 21 grad_norm 10k")

    shown.page.reload()
    added = shown.page.locator("#added figure")
    assert added.locator("h3").inner_text() == "entropy, grad_norm"
    added.get_by_role("button", name="Remove this plot").click()
    assert added.count() == 0
    shown.page.reload()
    assert added.count() == 0
    assert shown.said == []


def test_runs_over_one_another_are_told_apart_and_can_be_hidden(screen: Any, powers: Any) -> None:
    shown = screen(powers(3))
    _at(shown, "Entropy", 20)
    assert [line.strip() for line in shown.tip().split("\n")] == [
        "step 20", "entropy run1: 21", "entropy run2: 22", "entropy run3: 23"
    ]  # fmt: skip
    signs = _plot(shown, "Entropy").locator(".known .u-marker")
    assert len({sign.evaluate("one => getComputedStyle(one).backgroundColor") for sign in signs.all()}) == 3

    shown.page.get_by_role("group", name="Runs that are shown").get_by_label("run2").uncheck()
    _plot(shown, "Entropy").get_by_text("run2").wait_for(state="detached")
    assert _value(shown, "Entropy").endswith("run1 21 run3 23")
    assert shown.said == []


def test_a_run_of_100_000_steps_is_a_small_page_that_loses_no_spike(screen: Any, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt(total_steps=100_000)
    with writer.run.metrics.open("a") as file:
        for step in range(1, 100_001):
            stats = {f"number_{index}": step % (97 + index) for index in range(12)}
            stats["number_0"] = 1e6 if step == 77_777 else 1.0
            file.write(json.dumps({"kind": "step", "global_step": step, "stats": stats}) + "\n")
    address = write_report(tmp_path, writer.run)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000

    shown = screen(address)
    shown.page.get_by_text("Other numbers").click()
    shown.page.locator(".u-over").first.wait_for()
    _at(shown, "number_0", 77_777, 100_000)
    _focus(shown, "number_0")
    for _ in range(9):  # a pixel is several points wide
        if "1M" in shown.tip():
            break
        shown.page.keyboard.press("ArrowRight")
    assert "steps 77701 to 77800" in shown.tip()
    assert "1 … 1M" in shown.tip()  # no spike is lost
    assert shown.said == []


def test_a_setting_is_found_in_the_configuration(screen: Any, powers: Any) -> None:
    shown = screen(powers(1))
    shown.page.get_by_text("Configuration", exact=True).click()
    shown.page.get_by_label("Find a setting").fill("group_SIZE")

    rows = [row.inner_text() for row in shown.page.locator("#configuration tbody tr").all() if row.is_visible()]
    assert [row.split()[0] for row in rows] == ["rollout.group_size"]


def test_a_dashboard_leaves_plots_as_the_reader_has_them(
    screen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zoom, an added plot, a line that was hidden and a plot that was enlarged, while steps come."""
    monkeypatch.setattr("clusterkit.observe.report.dashboard.LIVE_SECONDS", 0.2)
    writer = RunWriter(tmp_path).attempt().steps(1, 5)
    with Dashboard(0, Views(tmp_path, None, None)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        shown = screen(server.url)
        shown.page.get_by_label("Numbers to plot").fill("step_time_s")
        shown.page.keyboard.press("Enter")
        shown.page.locator("#from").fill("3")
        shown.page.keyboard.press("Enter")
        _plot(shown, "Reward").get_by_role("button", name="Enlarge").click()
        hidden = _plot(shown, "Throughput").locator(".u-off .u-label")
        _plot(shown, "Throughput").locator(".u-label").get_by_text("tokens_per_s").click()
        assert hidden.inner_text() == "tokens_per_s"

        for last in (6, 7):
            writer.steps(last, last)
            shown.page.get_by_text(f"{last} of 30").wait_for()
            assert _value(shown, "step_time_s").endswith("step_time_s 4")
            assert hidden.inner_text() == "tokens_per_s"
            assert shown.page.locator("figure.wide h3").inner_text().startswith("Reward")
            assert (shown.page.locator("#from").input_value(), shown.page.locator("#to").input_value()) == ("3", "5")
        writer.record("warning", message="no step of the training")  # the plots stay, all of them
        shown.page.get_by_text("no step of the training").wait_for()
        assert shown.page.locator("#added canvas").count() == 1
        assert shown.said == []
        server.shutdown()
