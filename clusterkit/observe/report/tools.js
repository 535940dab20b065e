// All plots of a page: zoom, those in sight, plots of one's own, and the tools above them.
// All plots

const zoom = (range) => {
  state.zoom = range && range[1] - range[0] >= 1e-9 ? [Math.max(range[0], data.x[0]), Math.min(range[1], data.x[1])] : null;
  for (const u of plots.values()) u.setScale("x", { min: data.x[0], max: data.x[1] });
  show();
};

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.near = isIntersecting;
    if (isIntersecting && target.stale) redraw(target);
  }
}, { rootMargin: AHEAD });
const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const u = plots.get(target.closest("figure"));
    if (u && target.clientWidth && Math.abs(u.width - target.clientWidth) > 1) u.setSize({ width: target.clientWidth, height: u.height });
  }
});

const redraw = (figure) => {
  figure.stale = false;
  draw(figure);
};

// Plots that are out of sight are drawn when they come into it.
const redrawAll = () => {
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    figure.stale = true;
    if (figure.near) redraw(figure);
  }
};

const begin = (figure, chart) => {
  figure.chart = chart;
  figure.dataset.plot = "";
  figure.stale = true;
  const act = (label, what, title) => make("button", { type: "button", "data-act": what, title, "aria-label": title }, label);
  const acts = make("span", { class: "acts" }, act("CSV", "csv", "Download these values as CSV"), act("⤢", "wide", "Enlarge or make small"));
  if (figure.dataset.added) acts.append(act("×", "drop", "Remove this plot"));
  figure.querySelector("figcaption").prepend(acts);
  figure.classList.toggle("wide", state.wide.has(titleOf(figure)));
  seen.observe(figure);
  sized.observe(figure.querySelector(".plot"));
};

const addPlot = (wanted) => {
  const names = fits(wanted.split(/[\s,]+/).filter(Boolean));
  const figure = make("figure", { "data-added": wanted },
    make("figcaption", {}, make("h3", {}, names.length > 3 ? wanted : names.join(", ") || wanted)),
    make("div", { class: "plot", tabindex: "0" }));
  byId("added").append(figure);
  begin(figure, { names, from_zero: false, stacked: null });
};

const download = (name, text) => {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: `${name}.csv` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

const fileName = (title) => [...data.runs, title].join(" ").replace(/[^\w.-]+/g, "-").slice(0, 120);

document.addEventListener("click", (event) => {
  const { act } = event.target.closest?.("button")?.dataset ?? {};
  const figure = event.target.closest?.("figure");
  if (act === "csv") download(fileName(titleOf(figure)), csv([figure.chart]));
  if (act === "all-csv") download(fileName("all"), csv([{ names: Object.keys(data.numbers), stacked: null }]));
  if (act === "all-steps") zoom(null);
  if (act === "wide") {
    if (figure.classList.toggle("wide")) state.wide.add(titleOf(figure));
    else state.wide.delete(titleOf(figure));
    redraw(figure);
  }
  if (act === "drop") {
    state.added = state.added.filter((one) => one !== figure.dataset.added);
    plots.get(figure)?.destroy();
    plots.delete(figure);
    figure.remove();
    keep();
  }
});

// The tools above the plots

const keep = () => {
  try {
    localStorage.setItem(KEPT, JSON.stringify({ smooth: state.smooth, log: state.log, added: state.added }));
  } catch { /* a browser that keeps nothing of files */ }
};

const recall = () => {
  try {
    const { smooth, log, added } = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    if (smooth >= 0 && smooth < 1) state.smooth = smooth;
    state.log = log === true;
    if (Array.isArray(added)) state.added = added.filter((one) => typeof one === "string");
  } catch { /* as above */ }
};

const show = () => {
  const tools = byId("tools");
  if (!tools || !data) return;
  tools.hidden = false;
  byId("smooth").value = state.smooth;
  byId("smooth-value").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
  byId("log").checked = state.log;
  const [low, high] = state.zoom ?? data.x;
  byId("from").value = Math.ceil(low - 1e-9);
  byId("to").value = Math.floor(high + 1e-9);
  tools.classList.toggle("zoomed", Boolean(state.zoom));
  for (const box of tools.querySelectorAll("[data-run]")) box.checked = !state.hidden.includes(box.dataset.run);
  for (const chip of tools.querySelectorAll("[data-chip]")) chip.style.setProperty("--c", colourOf({ stacked: null }, { run: Number(chip.dataset.chip) }));
};

document.addEventListener("submit", (event) => {
  if (event.target.id !== "add") return;
  event.preventDefault();
  const field = event.target.querySelector("input");
  const wanted = field.value.trim();
  const known = fits(wanted.split(/[\s,]+/).filter(Boolean));
  field.setCustomValidity(known.length ? "" : "No number has this name: choose one of the list, or use * for any part of it");
  if (!field.reportValidity()) return;
  if (!state.added.includes(wanted)) {
    state.added.push(wanted);
    addPlot(wanted);
    keep();
  }
  field.value = "";
});

document.addEventListener("input", (event) => {
  const { id, dataset } = event.target;
  if (dataset.filter) {
    const wanted = event.target.value.trim().toLowerCase();
    for (const row of document.querySelectorAll(`.${dataset.filter} tbody tr`)) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  }
  if (event.target.form?.id === "add") event.target.setCustomValidity("");
  if (id === "smooth") state.smooth = Number(event.target.value);
  else if (id === "log") state.log = event.target.checked;
  else if (dataset?.run !== undefined) {
    state.hidden = [...document.querySelectorAll("[data-run]:not(:checked)")].map((box) => box.dataset.run);
  } else return;
  keep();
  show();
  cancelAnimationFrame(state.frame);
  state.frame = requestAnimationFrame(redrawAll);
});
document.addEventListener("change", ({ target }) => {
  if (target.id !== "from" && target.id !== "to") return;
  const [from, to] = [Number(byId("from").value), Number(byId("to").value)];
  if (from < to) zoom([from, to]);
  else show();
});

const start = () => {
  const found = byId("shared");
  if (!found || found.dataset.seen) return; // the plots are those that were here
  plots.forEach((u) => u.destroy());
  plots.clear();
  for (const observer of [seen, sized]) observer.disconnect(); // those of plots that are gone
  found.dataset.seen = "yes";
  data = JSON.parse(found.textContent);
  point(null);
  if (state.zoom && (state.zoom[0] >= data.x[1] || state.zoom[1] <= data.x[0])) state.zoom = null;
  byId("names").replaceChildren(...Object.keys(data.numbers).sort().map((name) => make("option", { value: name })));
  document.querySelectorAll("figure[data-chart]").forEach((figure) => begin(figure, data.charts[Number(figure.dataset.chart)]));
  byId("added").replaceChildren();
  state.added.filter((wanted) => fits(wanted.split(/[\s,]+/).filter(Boolean)).length).forEach(addPlot);
  show();
  redrawAll();
};

recall();
document.addEventListener("renewed", start);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { show(); redrawAll(); });
window.addEventListener("beforeprint", () => document.querySelectorAll("figure[data-plot]").forEach((figure) => {
  if (figure.stale && figure.offsetParent) redraw(figure);
}));
start();
