// Held-out tasks: a question is chosen, and its sections are stepped through. Text is set as text, never as markup.
(() => {
  const NAMES = { before: "Before training", after: "After training" };
  const chosen = new Map(); // place on the page -> where its reader is, for the next content of a dashboard

  const memory = (task, at, name) => {
    const now = task.sections[at][name];
    const column = make("section", { "aria-label": NAMES[name] }, make("h4", {}, NAMES[name]));
    if (!now) {
      column.append(make("p", { class: "quiet" }, task[name] ? "This section was not read: the pass failed before."
        : name === "after" ? "Written when the run ends." : "Not recorded: the run began at another one's checkpoint."));
      return column;
    }
    const text = make("p", { class: "text", tabindex: "0" });
    showChanges(text, at ? task.sections[at - 1][name]?.text ?? "" : "", now.text);
    if (!now.text.trim()) text.append(make("span", { class: "quiet" }, "(empty)"));
    if (now.cut) text.append(make("span", { class: "cut" }, now.cut));
    const chip = (held, label) => make("li", { class: held ? "held" : "" }, `${held ? "✓" : "✗"} ${label}`);
    const chips = make("ul", { "aria-label": "What this memory has" });
    if (now.answer !== null) chips.append(chip(now.answer, "the answer"));
    task.gold.forEach((_, number) => chips.append(chip(now.has.includes(number + 1), `gold sentence [${number + 1}]`)));
    column.append(text, chips);
    return column;
  };

  const section = (task, at) => {
    const { parts, number } = task.sections[at];
    const text = make("p", { class: "text", tabindex: "0", role: "region", "aria-label": `Text of section ${number}` });
    for (const [words, gold] of parts) {
      if (gold < 0) text.append(make("span", { class: "cut" }, words));
      else text.append(gold ? make("mark", {}, words, make("sup", {}, `[${gold}]`)) : words);
    }
    return text.hasChildNodes() ? text : make("p", { class: "quiet" }, "What the agent read here is not recorded.");
  };

  const facts = (task) => {
    const rows = [["Gold answer", task.answers.join(" | ")]];
    task.gold.forEach((one, place) => {
      const where = one.sections.length ? `section ${one.sections.join(" and ")}` : "in no section that was read";
      rows.push([`Gold sentence [${place + 1}]`, `${one.title ? `${one.title}: ` : ""}${one.text} (${where})`]);
    });
    for (const [name, label] of Object.entries(NAMES)) {
      const pass = task[name];
      rows.push([`Answer ${label.toLowerCase()}`, !pass ? "not recorded yet" : pass.error ? `failed: ${pass.error}`
        : `${pass.score}: ${pass.answer || "(nothing)"}`]);
    }
    return make("dl", {}, ...rows.flatMap(([label, text]) => [make("dt", {}, label), make("dd", {}, text)]));
  };

  const build = (root, place) => {
    root.dataset.ready = "yes";
    const { tasks, more } = JSON.parse(root.querySelector("script").textContent);
    const state = chosen.get(place) ?? { task: 0, at: 0 };
    chosen.set(place, state);
    if (state.task >= tasks.length) Object.assign(state, { task: 0, at: 0 });
    const select = make("select", {}, ...tasks.map((task, number) => make("option", { value: number },
      `${number}: ${task.before?.score ?? "-"} → ${task.after?.score ?? "-"}  ${task.question.slice(0, 120)}`)));
    const about = make("div");
    const steps = make("div", { role: "group", "aria-label": "Sections", class: "steps" });
    const where = make("p", { role: "status", class: "where" });
    const shown = make("div");

    const show = (at) => {
      const task = tasks[state.task];
      state.at = Math.min(Math.max(at, 0), task.sections.length - 1);
      if (state.at < 0) {
        where.textContent = "This agent reads no sections.";
        shown.replaceChildren();
        return;
      }
      const [now, last] = [task.sections[state.at], task.sections[state.at - 1]];
      [...steps.querySelectorAll("[data-at]")].forEach((step) => {
        if (Number(step.dataset.at) === state.at) step.setAttribute("aria-current", "step");
        else step.removeAttribute("aria-current");
      });
      for (const [way, end] of [["-1", 0], ["1", task.sections.length - 1]]) {
        steps.querySelector(`[data-way="${way}"]`).setAttribute("aria-disabled", String(state.at === end));
      }
      const gold = now.gold.length ? `, with gold sentence ${now.gold.map((one) => `[${one}]`).join(" and ")}` : "";
      const since = last && last.number !== now.number - 1 ? `; changes are those since section ${last.number}` : "";
      where.textContent = `Section ${now.number} of ${task.count}${gold}${since}`;
      const columns = make("div", { class: "memories" }, ...Object.keys(NAMES).map((name) => memory(task, state.at, name)));
      shown.replaceChildren(section(task, state.at), make("h4", {}, "The memory after it"), columns);
    };

    const open = (number, at = 0) => {
      state.task = number;
      select.value = number;
      const task = tasks[number];
      const button = (label, attributes) => make("button", { type: "button", ...attributes }, label);
      steps.replaceChildren(button("‹ Previous", { "data-way": "-1" }), button("Next ›", { "data-way": "1" }),
        ...task.sections.map((one, place) => button(`${one.number}${one.gold.length ? " ★" : ""}`, {
          "data-at": place, "aria-label": `Section ${one.number}${one.gold.length ? ", with a gold sentence" : ""}` })));
      about.replaceChildren(make("p", { class: "question" }, task.question), facts(task));
      show(at);
    };

    select.addEventListener("change", () => open(Number(select.value)));
    steps.addEventListener("click", (event) => {
      const { at, way } = event.target.closest("button")?.dataset ?? {};
      if (at ?? way) show(at ? Number(at) : state.at + Number(way));
    });
    root.addEventListener("keydown", (event) => {
      const places = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, Home: 0, End: Infinity };
      const plain = !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey);
      if (!plain || event.target === select || !(event.key in places)) return;
      event.preventDefault();
      show(places[event.key]);
    });
    const left = Math.max(...tasks.map((task) => task.count - task.sections.length));
    const notes = [more ? `${more} further tasks` : "", left > 0 ? "sections of long documents" : ""].filter(Boolean);
    root.append(make("label", {}, "Question ", select), about, steps, where, shown, make("p", { class: "quiet" },
      "Underlined words are new since the section before, struck ones are gone; ★ marks sections with a gold sentence. " +
      "Arrow keys step through the sections. A memory has a gold sentence with four fifths of its words." +
      (notes.length ? ` Left out: ${notes.join(" and ")}; clusterkit trace --heldout --task-id K has all.` : "")));
    open(state.task, state.at);
  };

  const start = () => document.querySelectorAll(".heldout").forEach((root, place) => root.dataset.ready || build(root, place));
  document.addEventListener("renewed", start);
  start();
})();
