"""Pages in a real browser without a window: plots drawn, readable in the dark and on a phone, and live."""

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
from browsers import DESKTOP, PHONE
from builders import byte_tokenizer
from heldout_writer import careful, forgetful, write_heldout
from run_writer import RunWriter
from runs import Trial

from clusterkit.observe.report.dashboard import Dashboard, Views
from clusterkit.observe.report.page import content, document
from clusterkit.observe.report.source import RunReader
from clusterkit.runs.directory import RunDirectory
from trainer.rollout.record import write_rollouts
from trainer.types import Completion, Group, Task, Trajectory, Turn

# How the WCAG measures contrast, of what the browser really computed.
CONTRAST = """([element, property, ground]) => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((value) => value / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [one, other] = [light(getComputedStyle(document.querySelector(element))[property]),
    light(getComputedStyle(document.querySelector(ground)).backgroundColor)];
  return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
}"""

# The plots in sight (or told to print) whose canvas shows none of their lines' colours.
UNDRAWN = """async () => {
  dispatchEvent(new Event("beforeprint"));
  await new Promise(requestAnimationFrame);
  const isOf = (data, at, [r, g, b]) => data[at + 3] > 200 &&
    Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 12;
  return [...document.querySelectorAll("figure")].filter((figure) => {
    if (figure.closest("details:not([open])")) return false;
    const canvas = figure.querySelector("canvas");
    if (!canvas || canvas.clientWidth < 200 || canvas.clientHeight < 100) return true;
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    const colours = [...figure.querySelectorAll(".known .u-marker")].map((sign) => {
      const style = getComputedStyle(sign);
      return (style.borderTopWidth === "0px" ? style.backgroundColor : style.borderTopColor).match(/\\d+/g).map(Number);
    });
    for (let at = 0; at < data.length; at += 4) if (colours.some((one) => isOf(data, at, one))) return false;
    return true;
  }).map((figure) => figure.querySelector("h3").textContent);
}"""

# The least contrast of colours of page.css against a plot's ground.
LEAST = """(names) => Math.min(...names.map((name) => {
  const probe = document.querySelector("figure").appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  probe.id = "probe";
  const found = (CONTRAST)(["#probe", "color", "figure"]);
  probe.remove();
  return found;
}))""".replace("CONTRAST", CONTRAST)


@pytest.fixture
def address(tmp_path: Path) -> str:
    """A report of two runs, one of them with restarts, checkpoints and values that are no numbers."""
    one, other = RunWriter(tmp_path, trial="run1").config("seed=1"), RunWriter(tmp_path, trial="run2").config("seed=2")
    one.attempt().steps(1, 12).recover(12).record("save", global_step=12, bytes=5_000_000, path="kept", seconds=1.0)
    one.steps(13, 17).finish("failed", 17, "NCCL time-out").attempt(resume_step=12).steps(13, 700, total_steps=700)
    one.record("step", global_step=701, stats={"task_reward": "nan", "grad_norm": 1.0})
    one.record("warning", message="<b>a</b> warning with a_very_long_word_" + 40 * "without_an_end_")
    other.attempt().steps(1, 500)
    return _report(tmp_path, one.run, other.run)


def _report(folder: Path, *directories: RunDirectory) -> str:
    file = folder / "report.html"
    file.write_text(document("a report", content([RunReader(one).read() for one in directories], 1.8e9)))
    return file.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_report_is_drawn_and_readable_everywhere(
    screen: Any, address: str, viewport: dict[str, int], scheme: str
) -> None:
    shown = screen(address, viewport, scheme)

    assert shown.page.locator("figure").count() >= 4
    assert shown.page.evaluate(UNDRAWN) == []
    assert shown.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]  # nothing sticks out
    for element in ("h1", ".quiet", ".facts tbody th", ".badge", ".odd", ".legend", ".u-legend", ".tools label"):
        ground = "figure" if element in (".odd", ".u-legend") else "body"
        assert shown.page.evaluate(CONTRAST, [element, "color", ground]) >= 4.5, element
    assert shown.page.evaluate(LEAST, [*(f"--c{number}" for number in range(7)), "--save", "--restart"]) >= 3
    assert shown.page.evaluate(LEAST, ["--quiet", "--text"]) >= 4.5  # ticks
    dark = shown.page.evaluate(CONTRAST, ["html", "color", "body"]) and scheme == "dark"
    background = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") is not dark
    assert shown.said == []
    assert shown.asked == [address]


def test_the_values_under_the_pointer_are_told(screen: Any, address: str) -> None:
    shown = screen(address)
    plot = shown.page.locator(".u-over").first
    width = plot.bounding_box()["width"]

    plot.hover(position={"x": width - 1, "y": 50})
    at_the_end = shown.tip()
    plot.hover(position={"x": width * 11 / 700, "y": 50})
    at_the_restart = shown.tip()
    shown.page.mouse.move(1, 1)

    assert "task_reward run1: 7" in at_the_end
    assert "task_reward run2: 5 (step 500)" in at_the_end
    assert "step 12" in at_the_restart
    assert "attempt 2 went on from here: NCCL time-out" in at_the_restart
    assert "checkpoint kept, 5 MB" in at_the_restart
    assert shown.page.locator(".tip").count() == 0
    assert shown.said == []


def test_values_can_be_read_by_touch_and_by_keyboard(screen: Any, address: str) -> None:
    shown = screen(address, PHONE)
    plot = shown.page.locator(".plot").first

    plot.scroll_into_view_if_needed()
    plot.locator(".u-over").tap(position={"x": 100, "y": 50})
    assert "task_reward run1" in shown.tip()
    shown.page.locator("figure h3").first.tap()
    assert shown.page.locator(".tip").count() == 0
    plot.locator(".u-over").tap(position={"x": 100, "y": 50})
    assert "task_reward run1" in shown.tip()
    shown.page.keyboard.press("Escape")
    assert shown.page.locator(".tip").count() == 0

    plot.focus()
    shown.page.keyboard.press("ArrowLeft")
    before = shown.tip()
    shown.page.keyboard.press("ArrowLeft")
    assert shown.tip() != before
    box = shown.page.locator(".tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= PHONE["width"]


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
    return lambda count: _report(tmp_path, *runs[:count])


def _plot(shown: Any, title: str) -> Any:
    return shown.page.locator("figure").filter(has=shown.page.get_by_role("heading", name=re.compile(rf"^{title}\b")))


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
        _plot(shown, "Entropy").locator(".plot").focus()
        shown.page.keyboard.press(key)
        assert shown.tip().startswith(f"step {step}\n")
        shown.page.keyboard.press("Escape")

    reward.dblclick()
    assert [end.input_value() for end in ends] == ["1", "20"]
    ends[0].fill("12")
    ends[1].fill("14")
    ends[1].press("Enter")
    _plot(shown, "Reward").locator(".plot").focus()
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


def test_a_run_of_100_000_steps_opens_and_zooms_at_once(screen: Any, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path).attempt(total_steps=100_000)
    with writer.run.metrics.open("a") as file:
        for step in range(1, 100_001):
            stats = {f"number_{index}": step % (97 + index) for index in range(12)}
            stats["number_0"] = 1e6 if step == 77_777 else 1.0
            file.write(json.dumps({"kind": "step", "global_step": step, "stats": stats}) + "\n")
    address = _report(tmp_path, writer.run)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000

    shown = screen(address)
    shown.page.get_by_text("Other numbers").click()
    shown.page.locator(".u-over").first.wait_for()
    assert shown.page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 5_000
    took = shown.page.evaluate(
        """async () => {
          const began = performance.now();
          const smooth = document.getElementById("smooth");
          smooth.value = 0.5;
          smooth.dispatchEvent(new Event("input", { bubbles: true }));
          await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          return performance.now() - began;
        }"""
    )
    assert took < 3_000
    _at(shown, "number_0", 77_777, 100_000)
    _plot(shown, "number_0").locator(".plot").focus()
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


@pytest.fixture
def rollouts(tmp_path: Path) -> RunWriter:
    """A run whose steps 1 and 2 have trajectories of a text memory, with two samples each."""
    writer = RunWriter(tmp_path).attempt().steps(1, 2)
    for step in (1, 2):
        write_step(writer.run, step)
    return writer


def write_step(run: RunDirectory, step: int) -> None:
    """Record the trajectories of a step: two samples, the second of which is right."""
    (run.logs / "rollouts").mkdir(exist_ok=True)
    tokenizer = byte_tokenizer()

    def turn(kind: Any, text: str) -> Turn:
        ids = tokenizer(text)["input_ids"]
        return Turn(kind, [1], Completion(ids, [-1.0] * len(ids), "stop", 0))

    def read(last: str, reward: float) -> Trajectory:
        turns = [turn("update", f"Ada <b>lives</b> somewhere, step {step}"), turn("update", last), turn("final", "x")]
        return Trajectory(f"t{step}", turns, reward, "x")

    group = Group(
        Task(f"t{step}", "Where does Ada live?", ("Arnby",)),
        [read("Ada <b>lives</b> nowhere", 0.0), read("Ada <b>lives</b> in Arnby", 1.0)],
    )
    write_rollouts(run.logs / "rollouts" / f"step_{step}.jsonl.zst", [group], [-0.5, 0.5], tokenizer)


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_rollouts_are_clicked_through_turn_by_turn(
    screen: Any, tmp_path: Path, rollouts: RunWriter, viewport: dict[str, int]
) -> None:
    address = _report(tmp_path, rollouts.run)
    shown = screen(address, viewport)
    part = shown.page.locator(".rollouts")

    assert part.get_by_label("Step").input_value() == "2"
    assert part.locator("[aria-current]").all_inner_texts() == ["1: 1", "1"]  # the best sample, its first turn
    assert "Gold answer\nArnby" in part.inner_text()
    part.get_by_role("button", name="Turn 2").click()
    assert part.locator("ins").all_inner_texts() == ["in Arnby"]
    assert part.locator(".where").inner_text() == "Turn 2 of 3"
    assert "has the answer" in part.inner_text()
    part.get_by_role("button", name="Sample 0").click()
    assert part.locator("ins").all_inner_texts() == ["nowhere"]
    shown.page.keyboard.press("ArrowLeft")
    assert "Ada <b>lives</b> somewhere, step 2" in part.inner_text()
    part.get_by_label("Step").select_option("1")
    assert "Ada <b>lives</b> somewhere, step 1" in part.inner_text()
    assert shown.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert (shown.said, shown.asked) == ([], [address])


def test_a_dashboard_leaves_the_rollout_that_is_read(
    screen: Any, tmp_path: Path, rollouts: RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterkit.observe.report.dashboard.LIVE_SECONDS", 0.2)
    with Dashboard(0, Views(tmp_path, None, None)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        shown = screen(server.url)
        part = shown.page.locator(".rollouts")
        part.get_by_role("button", name="Turn 2").click()

        write_step(rollouts.run, 3)
        rollouts.steps(3, 3)
        shown.page.get_by_text("3 of 30").wait_for()
        assert part.locator(".where").inner_text() == "Turn 2 of 3"
        assert part.get_by_label("Step").input_value() == "2"

        shown.page.evaluate("document.activeElement.blur()")
        part.get_by_role("option", name="step 3").wait_for(state="attached")
        assert part.get_by_label("Step").input_value() == "3"  # it was the newest that was shown
        assert part.locator(".where").inner_text() == "Turn 2 of 3"
        assert shown.said == []
        server.shutdown()


@pytest.fixture
def questions(tmp_path: Path, mini_hotpotqa: Path) -> str:
    """A report of a run with held-out questions, before and after training."""
    writer = RunWriter(tmp_path).attempt().steps(1, 3)
    write_heldout(writer.run.logs, mini_hotpotqa, "before", forgetful, chunk_tokens=90)
    write_heldout(writer.run.logs, mini_hotpotqa, "after", careful, chunk_tokens=90)
    return _report(tmp_path, writer.run)


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_held_out_questions_are_clicked_through(screen: Any, questions: str, viewport: dict[str, int]) -> None:
    shown = screen(questions, viewport)
    part = shown.page.locator(".heldout")
    memories = part.locator(".memories section")

    assert "Section 1 of 3, with gold sentence [1]" in part.inner_text()
    assert part.locator("mark").first.inner_text().startswith("Kit Lark is a painter who was born in")
    assert memories.first.locator("ins").inner_text() == "Nothing useful so far."
    part.get_by_role("button", name="Next").click()
    part.get_by_role("button", name="Section 3, with a gold sentence").click()
    assert part.locator(".where").inner_text() == "Section 3 of 3, with gold sentence [2]"
    assert part.locator("[aria-current]").inner_text() == "3 ★"
    assert part.locator("mark").inner_text() == "Kelmar is a town on the river Yarrow.[2]"
    assert memories.first.locator("ins, del").count() == 0
    assert memories.first.locator(".held").count() == 0
    assert memories.last.locator("ins").inner_text().strip().endswith("Kelmar is a town on the river Yarrow.")
    assert "✓ the answer" in memories.last.inner_text()
    assert "F1 1.00: \\boxed{Yarrow}" in part.inner_text()

    part.get_by_label("Question").select_option("1")
    assert "where Bo Marsh was born" in part.locator(".question").inner_text()
    assert part.locator(".where").inner_text().startswith("Section 1 of")
    side_by_side = memories.first.bounding_box()["y"] == memories.last.bounding_box()["y"]
    assert side_by_side is (viewport is DESKTOP)
    assert shown.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert shown.said == []
    assert shown.asked == [questions]


def test_held_out_questions_are_stepped_through_by_keyboard(screen: Any, questions: str) -> None:
    shown = screen(questions)
    where = shown.page.locator(".heldout .where")
    shown.page.get_by_role("button", name="Next").focus()

    for key, section in (("ArrowRight", 2), ("End", 3), ("ArrowRight", 3), ("ArrowLeft", 2), ("Home", 1), ("Enter", 2)):
        shown.page.keyboard.press(key)
        assert where.inner_text().startswith(f"Section {section} of 3"), key
    assert where.get_attribute("role") == "status"  # read out
    shown.page.get_by_label("Question").focus()
    shown.page.keyboard.press("ArrowRight")
    assert "Bo Marsh" in shown.page.locator(".heldout .question").inner_text()  # its own arrow keys
    for element in (".heldout .where", ".heldout dt", ".heldout li", ".heldout ins"):
        assert shown.page.evaluate(CONTRAST, [element, "color", ".heldout"]) >= 4.5, element


def test_a_dashboard_leaves_the_section_that_is_read_and_takes_up_the_end_of_the_run(
    screen: Any, tmp_path: Path, mini_hotpotqa: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterkit.observe.report.dashboard.LIVE_SECONDS", 0.2)
    writer = RunWriter(tmp_path).attempt().steps(1, 2)
    write_heldout(writer.run.logs, mini_hotpotqa, "before", forgetful, chunk_tokens=90)
    with Dashboard(0, Views(tmp_path, None, None)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        shown = screen(server.url)
        part = shown.page.locator(".heldout")
        part.get_by_label("Question").select_option("1")
        part.get_by_role("button", name="Next").click()
        assert "Written when the run ends." in part.inner_text()

        writer.steps(3, 5)
        shown.page.get_by_text("5 of 30").wait_for()
        assert part.locator(".where").inner_text().startswith("Section 2 of")
        assert shown.page.evaluate("document.activeElement.textContent").startswith("Next")

        write_heldout(writer.run.logs, mini_hotpotqa, "after", careful, chunk_tokens=90)
        part.get_by_text("F1 1.00: ").wait_for()
        assert part.locator(".where").inner_text().startswith("Section 2 of")
        assert "Bo Marsh" in part.locator(".question").inner_text()
        assert shown.said == []
        server.shutdown()


def test_a_report_is_drawn_where_scripts_are_off(browser: Any, address: str) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(address)

    assert page.locator("path.line").first.is_visible()
    page.close()


def test_a_real_run_is_drawn(screen: Any, reference: Trial, tmp_path: Path) -> None:
    paths = reference.config
    run = RunDirectory(Path(paths.fileroot), reference.paths.logs.parents[1].name, "small", "run1")

    shown = screen(_report(tmp_path, run), PHONE)

    titles = shown.page.locator("figure h3").all_inner_texts()
    for title in ("Reward", "Held-out accuracy", "Clip ratio", "KL", "Lengths", "Throughput", "Time of a step"):
        assert any(one.startswith(title) for one in titles), title
    assert shown.page.evaluate(UNDRAWN) == []
    assert shown.page.locator(".badge.finished").count() == 1
    assert shown.page.locator("#closing th").first.inner_text().startswith("held-out accuracy")
    assert shown.said == []


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


def test_a_dashboard_follows_the_run_without_a_reload(
    screen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clusterkit.observe.report.dashboard.LIVE_SECONDS", 0.2)
    writer = RunWriter(tmp_path).attempt()
    with Dashboard(0, Views(tmp_path, None, None)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        shown = screen(server.url)
        shown.page.get_by_text("No training step has ended yet").wait_for()

        writer.steps(1, 5)
        shown.page.get_by_text("5 of 30").wait_for()
        assert shown.page.evaluate(UNDRAWN) == []

        # What is read in a plot stays while the numbers above go on.
        shown.page.locator(".u-over").first.hover()
        writer.record("warning", message="<img src=x onerror=alert(1)>")
        shown.page.mouse.move(1, 1)
        shown.page.get_by_text("<img src=x onerror=alert(1)>").wait_for()
        assert shown.page.locator("img").count() == 0

        RunWriter(tmp_path, trial="run2").attempt().steps(1, 9)
        shown.page.get_by_text("tiny-recall/run2").last.wait_for()
        shown.page.reload()
        shown.page.get_by_text("against none").click()
        shown.page.get_by_role("checkbox", name="tiny-recall/run1").check()
        shown.page.get_by_text("Show").click()
        shown.page.locator(".facts").wait_for()
        shown.page.locator("#live[data-seen]").wait_for()
        assert shown.said == []
        server.shutdown()

    shown.page.get_by_text("The dashboard does not answer").wait_for()
