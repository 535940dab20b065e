"""Pages in a real browser without a window: plots drawn, readable in the dark and on a phone, and live."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from browsers import DESKTOP, PHONE
from builders import byte_tokenizer
from heldout_writer import careful, forgetful, write_heldout
from reportpage import write_report
from run_writer import RunWriter
from runs import Trial

from clusterkit.observe.report.dashboard import Dashboard, Views
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
    return write_report(tmp_path, one.run, other.run)


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


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_scores_over_documents_are_drawn_below_their_table(
    screen: Any, tmp_path: Path, viewport: dict[str, int]
) -> None:
    scores = {"before": 0.2, "interval_before": [0.1, 0.3], "after": 0.4, "interval_after": [0.3, 0.5]}
    rows = [
        {"documents": count, "blank_memory": blank, **scores} for count, blank in ((8, False), (32, False), (0, True))
    ]
    writer = RunWriter(tmp_path).summary(table=rows, trained_documents=8, trained_chunks=[], chance=None)
    address = write_report(tmp_path, writer.run)

    shown = screen(address, viewport)
    drawing = shown.page.locator("#closing svg")
    dots = [dot.bounding_box() for dot in drawing.locator("circle").all()]
    colours = drawing.locator("circle").evaluate_all("dots => dots.map((dot) => getComputedStyle(dot).fill)")

    assert drawing.bounding_box()["y"] > shown.page.locator("#closing table").bounding_box()["y"]
    assert [dot["x"] < viewport["width"] / 2 for dot in dots] == [True, viewport is DESKTOP, True, viewport is DESKTOP]
    assert dots[0]["y"] > dots[2]["y"]  # 20 below 40 percent
    assert colours == ["rgb(188, 76, 0)"] * 2 + ["rgb(9, 105, 218)"] * 2
    assert shown.page.locator("#closing .legend i.dashed").count() == 1
    assert shown.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
    assert (shown.said, shown.asked) == ([], [address])


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
    address = write_report(tmp_path, rollouts.run)
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
    writer = RunWriter(tmp_path).config("reward.name=f1").attempt().steps(1, 3)
    write_heldout(writer.run.logs, mini_hotpotqa, "before", forgetful, chunk_tokens=90)
    write_heldout(writer.run.logs, mini_hotpotqa, "after", careful, chunk_tokens=90)
    return write_report(tmp_path, writer.run)


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_held_out_questions_are_clicked_through(screen: Any, questions: str, viewport: dict[str, int]) -> None:
    shown = screen(questions, viewport)
    tops = [
        shown.page.locator(it).first.bounding_box()["y"] for it in ("#plots figure", "#heldout", "#more-plots figure")
    ]
    assert tops == sorted(tops), "the learning curve, how it reads, and then all other plots"
    assert shown.page.locator("#plots figure").count() <= 2
    assert shown.page.locator("#more-plots figure").count() > 2
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
    writer = RunWriter(tmp_path).config("reward.name=f1").attempt().steps(1, 2)
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

    shown = screen(write_report(tmp_path, run), PHONE)

    titles = shown.page.locator("figure h3").all_inner_texts()
    for title in ("Reward", "Held-out accuracy", "Clip ratio", "KL", "Lengths", "Throughput", "Time of a step"):
        assert any(one.startswith(title) for one in titles), title
    assert shown.page.evaluate(UNDRAWN) == []
    assert shown.page.locator(".badge.finished").count() == 1
    assert shown.page.locator("#closing th").first.inner_text().startswith("held-out accuracy")
    assert shown.said == []


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
