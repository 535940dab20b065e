// Values under the pointer, and on the dashboard the page as it is now. Text is set as text, never as markup.
"use strict";
(() => {
  const main = document.querySelector("main");
  let shared = null;

  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    return String(+value.toPrecision(5));
  };

  const nearest = (grid, step) => {
    const [first, last = first] = grid;
    let best = 0;
    for (let i = 1; i < first.length; i++) {
      const middle = (first[i] + last[i]) / 2;
      if (Math.abs(middle - step) <= Math.abs((first[best] + last[best]) / 2 - step)) best = i;
    }
    return best;
  };

  const row = (tip, className, text, range = "") => {
    const line = tip.appendChild(document.createElement("div"));
    if (className) line.appendChild(document.createElement("i")).className = className;
    line.append(text);
    if (!range) return;
    const span = line.appendChild(document.createElement("span"));
    span.className = "range";
    span.textContent = ` (${range})`;
  };

  const point = (plot, share) => {
    shared ??= JSON.parse(document.getElementById("shared").textContent);
    const figure = plot.closest("figure");
    figure.lines ??= JSON.parse(figure.querySelector("script").textContent);
    const [low, high] = shared.x;
    const wanted = low + Math.min(Math.max(share, 0), 1) * (high - low);
    let tip = plot.querySelector(".tip");
    if (!tip) {
      tip = plot.appendChild(document.createElement("div"));
      tip.className = "tip";
      tip.setAttribute("role", "status");
    }
    tip.replaceChildren();
    let range = null;
    const rows = [];
    for (const line of figure.lines) {
      const grid = shared.grids[line.grid];
      if (!grid[0].length) continue;
      const at = nearest(grid, wanted);
      const from = grid[0][at], to = (grid[1] ?? grid[0])[at];
      if (!range || Math.abs((from + to) / 2 - wanted) < Math.abs((range[0] + range[1]) / 2 - wanted)) range = [from, to];
      const whose = shared.runs.length > 1 ? ` ${shared.runs[line.run]}` : "";
      const spread = line.low && line.low[at] !== line.high[at] ? `${short(line.low[at])} … ${short(line.high[at])}` : "";
      rows.push([line.style, `${line.label}${whose}: ${short(line.mean[at])}`, spread, from, to]);
    }
    if (!range) return;
    row(tip, "", range[0] === range[1] ? `step ${range[0]}` : `steps ${range[0]} to ${range[1]}`);
    for (const [className, text, spread, from, to] of rows) {
      const elsewhere = from > range[1] || to < range[0];
      row(tip, className, elsewhere ? `${text} (step ${from})` : text, spread);
    }
    const reach = (high - low) / 400;
    const happened = shared.marks.filter(([step]) => step >= range[0] - reach && step <= range[1] + reach);
    const latest = new Map(happened.map((mark) => [`${mark[1]} ${mark[2]}`, mark]));
    for (const [step, kind, run, text] of latest.values()) {
      row(tip, `mark ${kind}`, `${shared.runs.length > 1 ? `${shared.runs[run]}, ` : ""}step ${step}: ${text}`);
    }
    const x = ((range[0] + range[1]) / 2 - low) / (high - low);
    plot.querySelector(".cursor").setAttribute("transform", `translate(${x * 1000})`);
    plot.classList.add("pointed");
    const left = x * plot.clientWidth;
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(Math.min(left < plot.clientWidth / 2 ? left + 12 : left - tip.offsetWidth - 12, room), -40)}px`;
    plot.at = x;
  };

  const leave = (plot) => {
    plot.classList.remove("pointed");
    plot.querySelector(".tip")?.remove();
  };

  const follow = (event) => {
    const plot = event.target.closest?.(".plot");
    for (const other of document.querySelectorAll(".pointed")) if (other !== plot) leave(other);
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    point(plot, (event.clientX - box.left) / box.width);
  };
  document.addEventListener("pointermove", follow);
  document.addEventListener("pointerdown", follow);
  document.addEventListener("focusout", (event) => event.target.matches?.(".plot") && leave(event.target));
  document.addEventListener("keydown", (event) => {
    const plot = event.target.closest?.(".plot");
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape" && plot) leave(plot);
    if (!plot || !way) return;
    event.preventDefault();
    shared ??= JSON.parse(document.getElementById("shared").textContent);
    const figure = plot.closest("figure");
    figure.lines ??= JSON.parse(figure.querySelector("script").textContent);
    const [low, high] = shared.x;
    const [first, last = first] = shared.grids[figure.lines[0].grid];
    const now = nearest([first, last], low + (plot.at ?? (way > 0 ? 0 : 1)) * (high - low));
    const next = plot.at === undefined ? now : Math.min(Math.max(now + way, 0), first.length - 1);
    point(plot, ((first[next] + last[next]) / 2 - low) / (high - low));
  });

  const every = Number(document.body.dataset.live);
  if (!every) return;
  const show = (text) => {
    const template = document.createElement("template");
    template.innerHTML = text;
    const next = template.content;
    // Parts of the same records stay as they are, with the values that are being read in them.
    const kept = [...main.children].filter((old) => {
      const fresh = old.dataset.version && next.getElementById(old.id);
      return fresh && old.dataset.version === fresh.dataset.version;
    });
    const same = kept.some((element) => element.id === "plots");
    // Who reads values or selects text is not disturbed.
    if ((!same && document.querySelector(".pointed")) || !document.getSelection().isCollapsed) return;
    for (const element of main.querySelectorAll("details")) {
      next.getElementById(element.id)?.toggleAttribute("open", element.open);
    }
    for (const element of [...main.children]) if (!kept.includes(element)) element.remove();
    for (const old of kept) {
      const fresh = next.getElementById(old.id);
      while (next.firstChild !== fresh) old.before(next.firstChild);
      fresh.remove();
    }
    main.append(next);
    if (!same) shared = null;
    document.dispatchEvent(new Event("renewed"));
  };

  const refresh = async () => {
    const note = document.getElementById("live");
    try {
      const query = new URLSearchParams(location.search);
      query.set("drawn", [...main.children].map((element) => element.dataset.version ?? "").join(" "));
      const answer = await fetch(`/page?${query}`, { cache: "no-store" });
      const text = await answer.text();
      if (!answer.ok) throw new Error(text);
      show(text);
      note.textContent = "live";
      note.className = "";
    } catch (error) {
      note.textContent = `The dashboard does not answer (${error.message}). What is shown is of ${note.dataset.seen}.`;
      note.className = "lost";
      return;
    }
    note.dataset.seen = new Date().toLocaleTimeString();
  };
  setInterval(() => document.hidden || refresh(), every * 1000);
})();
