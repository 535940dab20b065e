// Trajectories of training steps: a step, a task and a sample are chosen, and its turns are stepped through.
(() => {
  const chosen = new Map(); // place on the page -> where its reader is, for the next content of a dashboard
  const text = (words, label) => make("p", { class: "text", tabindex: "0", role: "region", "aria-label": label }, words);
  const rounded = (value) => String(+value.toPrecision(4));

  const about = (one) => {
    const rows = one.asked.slice(0, 20).flatMap(([question, gold, answer, score]) => [
      ["Question", question], ["Gold answer", gold], ["Answer", `${answer || "(nothing)"}${score === null ? "" : ` (${rounded(score)})`}`]]);
    if (one.asked.length > 20) rows.push(["", `${one.asked.length - 20} further questions: clusterkit trace`]);
    one.gold.forEach((sentence, place) => rows.push([`Gold sentence [${place + 1}]`, sentence]));
    rows.push(["Reward", `${rounded(one.reward)}; those of its group: ${one.group.map(rounded).join(", ")}`]);
    const metrics = Object.entries(one.metrics).map(([name, value]) => `${name} ${rounded(value)}`);
    if (metrics.length) rows.push(["Metrics", metrics.join(", ")]);
    if (one.error) rows.push(["Failed", one.error]);
    return make("dl", {}, ...rows.flatMap(([label, words]) => [make("dt", {}, label), make("dd", {}, words)]));
  };

  const turn = (one, at) => {
    const now = one.turns[at], before = one.turns[at - 1];
    const parts = [];
    if (now.read) parts.push(make("h4", {}, "Read"), text(now.read, "What was read"));
    parts.push(make("h4", {}, now.calls.length ? "Calls" : at === one.turns.length - 1 && at ? "Wrote at the end" : "Wrote"));
    if (now.calls.length) {
      parts.push(make("ul", { class: "calls" }, ...now.calls.map((call) => make("li", {}, `${call.ok ? "✓" : "✗"} ${call.did}`,
        call.text ? make("span", { class: "text" }, call.text) : null, call.worth ? make("small", {}, call.worth) : null))));
    } else {
      const wrote = text("", "What was written");
      // A memory is rewritten in every turn; the answer at the end is none.
      if (before && at < one.turns.length - 1) showChanges(wrote, before.wrote, now.wrote);
      else wrote.append(now.wrote);
      if (!now.wrote.trim()) wrote.append(make("span", { class: "quiet" }, "(nothing)"));
      parts.push(wrote);
    }
    const notes = [now.held && `has ${now.held}`, `${now.tokens} tokens`, now.reward].filter(Boolean).join("; ");
    parts.push(make("p", { class: "quiet" }, notes));
    if (at === one.turns.length - 1 && Object.keys(one.memory).length) {
      parts.push(make("h4", {}, "Memory at the end"), ...Object.entries(one.memory).map(([store, entries]) =>
        make("div", {}, make("b", {}, store), make("ul", {}, ...entries.map((entry) => make("li", {}, entry))))));
    }
    return parts;
  };

  const build = (root, place) => {
    root.dataset.ready = "yes";
    const steps = JSON.parse(root.querySelector("script").textContent);
    const state = chosen.get(place) ?? { step: steps.at(-1).step, newest: true, task: 0, sample: null, at: 0 };
    chosen.set(place, state);
    const stepSelect = make("select", {}, ...steps.map(({ step }) => make("option", { value: step }, `step ${step}`)));
    const taskSelect = make("select", {});
    const samples = make("div", { role: "group", "aria-label": "Samples", class: "steps" });
    const turns = make("div", { role: "group", "aria-label": "Turns", class: "steps" });
    const where = make("p", { role: "status", class: "where" });
    const facts = make("div"), shown = make("div");
    const button = (label, attributes) => make("button", { type: "button", ...attributes }, label);
    const press = (group, name, value) => group.querySelectorAll(`[data-${name}]`).forEach((one) =>
      (one.dataset[name] === String(value) ? one.setAttribute("aria-current", "true") : one.removeAttribute("aria-current")));
    const group = () => steps.find(({ step }) => step === state.step).tasks[state.task];
    const trajectory = () => group().find(({ sample }) => sample === state.sample);

    const showTurn = (at) => {
      const one = trajectory();
      state.at = Math.min(Math.max(at, 0), one.turns.length - 1);
      press(turns, "at", state.at);
      where.textContent = one.turns.length ? `Turn ${one.turns[state.at].number} of ${one.count}` : "It has no turns.";
      shown.replaceChildren(...(one.turns.length ? turn(one, state.at) : []));
    };
    const showSample = (sample) => {
      state.sample = group().some((one) => one.sample === sample) ? sample
        : group().reduce((best, one) => (one.reward > best.reward ? one : best)).sample;
      press(samples, "sample", state.sample);
      const one = trajectory();
      facts.replaceChildren(about(one));
      turns.replaceChildren(...one.turns.map(({ number }, at) => button(String(number), { "data-at": at, "aria-label": `Turn ${number}` })));
      showTurn(state.at);
    };
    const showTask = (number) => {
      const { tasks } = steps.find(({ step }) => step === state.step);
      state.task = Math.min(Math.max(number, 0), tasks.length - 1);
      taskSelect.replaceChildren(...tasks.map(([one], at) => make("option", { value: at },
        `${one.task}  ${(one.asked[0]?.[0] ?? "").slice(0, 100)}`)));
      taskSelect.value = state.task;
      samples.replaceChildren(...group().map((one) => button(`${one.sample}: ${rounded(one.reward)}${one.error ? " failed" : ""}`, {
        "data-sample": one.sample, "aria-label": `Sample ${one.sample}, reward ${rounded(one.reward)}` })));
      showSample(state.sample);
    };
    const showStep = (step) => {
      const known = steps.map((one) => one.step);
      state.step = state.newest ? known.at(-1) : known.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
      stepSelect.value = state.step;
      showTask(state.task);
    };

    stepSelect.addEventListener("change", () => {
      state.newest = stepSelect.selectedIndex === steps.length - 1;
      showStep(Number(stepSelect.value));
    });
    taskSelect.addEventListener("change", () => showTask(Number(taskSelect.value)));
    samples.addEventListener("click", ({ target }) => target.dataset.sample && showSample(Number(target.dataset.sample)));
    turns.addEventListener("click", ({ target }) => target.dataset.at && showTurn(Number(target.dataset.at)));
    root.addEventListener("keydown", (event) => {
      const places = { ArrowLeft: state.at - 1, ArrowRight: state.at + 1, Home: 0, End: Infinity };
      const plain = !(event.altKey || event.ctrlKey || event.metaKey || event.shiftKey);
      if (!plain || event.target.tagName === "SELECT" || !(event.key in places)) return;
      event.preventDefault();
      showTurn(places[event.key]);
    });
    root.append(make("div", { class: "choices" }, make("label", {}, "Step", stepSelect), make("label", {}, "Task", taskSelect)), samples, facts, turns, where, shown,
      make("p", { class: "quiet" }, "Underlined words are new since the turn before, struck ones are gone. Arrow keys step through " +
        "the turns. The first tasks of some steps are here; clusterkit trace --step N --task-id K has all."));
    showStep(state.step);
  };

  const start = () => document.querySelectorAll(".rollouts").forEach((root, place) => root.dataset.ready || build(root, place));
  document.addEventListener("renewed", start);
  start();
})();
