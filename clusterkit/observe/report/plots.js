// One plot by uPlot, and what is told of the place that is pointed at.
const nearest = (values, at) => {
  for (let off = 0; off < values.length; off++) {
    if (values[at - off] != null) return at - off;
    if (values[at + off] != null) return at + off;
  }
  return null;
};

// The steps that a value stands for, and its place among the line's own values.
const placeOf = (column, u, at) => {
  const step = u.data[0][at];
  const own = column.first.findIndex((from, place) => (from + column.last[place]) / 2 === step);
  return { own, from: column.first[own], to: column.last[own] };
};

// One plot

const rangeOf = (chart) => (_, low, high) => {
  if (low === null || low === undefined) return state.log ? [0.1, 1] : [0, 1];
  const log = state.log && chart.stacked === null;
  if (log) return uPlot.rangeLog(low, high, 10, false);
  if (chart.from_zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < 1e-300) return [0, 1];
  const apart = high - low < 1e-3 * size ? size / 100 : (high - low) * 0.06; // less is rounding
  return [low === 0 && (chart.from_zero || high - low > 0) ? 0 : low - apart, high === 0 ? 0 : high + apart];
};

const axes = (chart) => {
  const font = "12px system-ui, sans-serif";
  const quiet = () => colour("--quiet"), grid = { stroke: () => colour("--border"), width: 1 };
  // Of many powers of ten only these have a line.
  const wide = (u) => state.log && u.scales.y.max > 100 * u.scales.y.min;
  const filter = (u, splits) => (wide(u) ? splits.map((value) => (Math.abs(Math.log10(value) % 1) < 1e-6 ? value : null)) : splits);
  return [
    { font, stroke: quiet, grid: { show: false }, ticks: grid, size: 30, gap: 3, space: 56,
      incrs: [1, 2, 5].flatMap((one) => Array.from({ length: 10 }, (_, power) => one * 10 ** power)).sort((a, b) => a - b),
      values: (_, splits) => splits.map((step) => tick(step, 1)) },
    { font, stroke: quiet, grid: { ...grid, filter }, ticks: { show: false }, gap: 6, space: 34,
      size: (u, texts) => 14 + 7 * Math.max(3, ...(texts ?? []).map((text) => `${text ?? ""}`.length)),
      values: (u, splits, axis, space, apart) => splits.map((value) => tick(value, state.log ? Math.abs(value) || 1 : apart)) },
  ];
};

// What stays the same of a line when the plot is drawn anew.
const keyOf = (figure, line) => `${titleOf(figure)}: ${line.names}, ${data.runs[line.run]}`;

const seriesOf = (figure, chart, { kind, line, values }) => {
  const on = { spanGaps: true, show: !state.off.has(keyOf(figure, line)) };
  const stroke = () => colourOf(chart, line);
  if (kind === "low" || kind === "high") return { ...on, class: "aux", width: 0, points: { show: false } };
  if (kind === "raw") return { ...on, class: "aux", stroke, width: 1, alpha: 0.3, points: { show: false } };
  return {
    ...on,
    label: isOf(chart) && chart.names.length === 1 ? data.runs[line.run] : labelOf(chart, line),
    class: "known",
    stroke,
    fill: chart.stacked === null ? undefined : stroke,
    width: chart.stacked === null ? 1.8 : 0,
    dash: dashOf(chart, line),
    points: { size: 5, fill: stroke, ...(chart.stacked === null ? {} : { show: false }) },
    value: (u, _, number, at) => {
      const found = at === null || at === undefined ? nearest(values, values.length - 1) : nearest(values, at);
      return found === null ? "" : short(values[found]);
    },
  };
};

const marksOf = (chart, u) => {
  const [low, high] = [u.scales.x.min, u.scales.x.max];
  const runs = new Set(u.columns.map((column) => column.line.run));
  return data.marks.filter(([step, , run]) => runs.has(run) && step >= low && step <= high);
};

const drawMarks = (chart) => (u) => {
  const { ctx, bbox } = u;
  ctx.save();
  for (const [step, kind] of marksOf(chart, u)) {
    const x = Math.round(u.valToPos(step, "x", true));
    ctx.beginPath();
    ctx.strokeStyle = colour(`--${kind}`);
    ctx.lineWidth = (kind === "recover" ? 1 : 1.5) * devicePixelRatio;
    ctx.setLineDash(kind === "restart" ? [4 * devicePixelRatio, 3 * devicePixelRatio] : []);
    ctx.moveTo(x, bbox.top + bbox.height);
    ctx.lineTo(x, bbox.top + bbox.height * (1 - ODD[kind]));
    ctx.stroke();
  }
  ctx.restore();
};

const draw = (figure) => {
  const { chart } = figure;
  const frame = figure.querySelector(".plot");
  plots.get(figure)?.destroy();
  plots.delete(figure);
  frame.querySelectorAll(".tip, .none").forEach((element) => element.remove());
  const { columns, joined } = columnsOf(chart);
  if (!columns.length) {
    frame.append(make("p", { class: "none quiet" }, "No run that is shown has this number."));
    return;
  }
  const bands = columns.flatMap(({ kind, line }, at) => (kind === "low"
    ? [{ series: [at + 2, at + 1], fill: () => `color-mix(in srgb, ${colourOf(chart, line)} 20%, transparent)` }] : []));
  const ink = (at) => colourOf(chart, columns[at - 1].line);
  const dashed = (at) => dashOf(chart, columns[at - 1].line)[0];
  const u = new uPlot({
    width: frame.clientWidth,
    height: figure.classList.contains("wide") ? 420 : 210,
    padding: [10, 12, 0, 0],
    scales: {
      x: { time: false, range: () => state.zoom ?? data.x },
      y: { distr: state.log && chart.stacked === null ? 3 : 1, range: rangeOf(chart) },
    },
    axes: axes(chart),
    series: [{ label: "step", class: "aux" }, ...columns.map((column) => seriesOf(figure, chart, column))],
    bands,
    legend: {
      // As the lines are: full ones have a full sign.
      markers: {
        width: (_, at) => (dashed(at) ? 2 : 0),
        stroke: (_, at) => ink(at),
        dash: (_, at) => (dashed(at) > 2 ? "dashed" : "dotted"),
        fill: (_, at) => (dashed(at) ? "transparent" : ink(at)),
      },
    },
    cursor: {
      y: false,
      drag: { x: true, y: false, setScale: false, dist: 8 },
      sync: { key: "steps", setSeries: false, scales: ["x", null], filters: { pub: (type) => type.startsWith("mousem") || type === "mouseleave" } },
      points: {
        size: 8,
        fill: (_, at) => (chart.stacked === null ? ink(at) : "transparent"),
        show: (self, at) => (columns[at - 1]?.kind === "line" && chart.stacked === null ? make("div", {}) : undefined),
      },
      dataIdx: (_, at, index) => (at ? nearest(columns[at - 1].values, index) ?? index : index),
      bind: {
        dblclick: () => () => { zoom(null); return null; },
        mousemove: (self, over, handler) => (event) => { if (!keyed) point(self); handler(event); return null; },
        mouseleave: (_, over, handler) => (event) => { if (!touched && !keyed) handler(event); return null; },
      },
    },
    hooks: {
      ...(chart.stacked === null ? { drawAxes: [drawMarks(chart)] } : { draw: [drawMarks(chart)] }),
      setSeries: [(self, at, { show }) => {
        const line = columns[at - 1]?.line;
        if (!line || show === undefined) return;
        if (chart.stacked !== null && !show) self.setSeries(at, { show: true }, false); // those above would stand on nothing
        else state.off[show ? "delete" : "add"](keyOf(figure, line));
        columns.forEach((one, place) => {
          if (one.line === line && one.kind !== "line") self.setSeries(place + 1, { show }, false);
        });
      }],
      setCursor: [(self) => self === active && tell(self, figure)],
      setSelect: [(self) => {
        const { left, width } = self.select;
        self.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        if (self === active && width > 0) zoom([self.posToVal(left, "x"), self.posToVal(left + width, "x")]);
      }],
    },
  }, joined, frame);
  u.columns = columns;
  u.over.addEventListener("mouseenter", () => { if (!keyed) point(u); });
  u.over.addEventListener("mouseleave", () => { if (active === u && !touched && !keyed) point(null); });
  plots.set(figure, u);
};

// What is pointed at

const point = (u) => {
  if (active && active !== u) active.root.closest(".plot").querySelector(".tip")?.remove();
  active = u;
};

const row = (tip, fill, text, range = "") => {
  const line = tip.appendChild(make("div", {}));
  if (fill) line.appendChild(make("i", fill)).style.setProperty("--c", fill.ink ?? "");
  line.append(text);
  if (range) line.appendChild(make("span", { class: "range" }, ` (${range})`));
};

const tell = (u, figure) => {
  const { chart } = figure;
  const frame = figure.querySelector(".plot");
  frame.querySelector(".tip")?.remove();
  const { left, idx } = u.cursor;
  if (left < 0 || idx === null || idx === undefined) return;
  const tip = frame.appendChild(make("div", { class: "tip", role: "status" }));
  const wanted = u.data[0][idx];
  let from = null, to = null;
  const rows = u.columns.flatMap((column, number) => {
    if (column.kind !== "line" || !u.series[number + 1].show) return [];
    const at = u.cursor.idxs[number + 1];
    const place = at === null ? { own: -1 } : placeOf(column, u, at);
    if (place.own < 0 || column.values[at] == null) return [];
    if (from === null || Math.abs(u.data[0][at] - wanted) < Math.abs((from + to) / 2 - wanted)) [from, to] = [place.from, place.to];
    const { line } = column;
    const ends = line.low && line.low[place.own] !== line.high[place.own]
      ? [`${short(line.low[place.own])} … ${short(line.high[place.own])}`] : [];
    if (state.smooth) ends.unshift(`raw ${short(line.mean[place.own])}`);
    return [[column, `${labelOf(chart, line)}: ${short(column.values[at])}`, ends.join(", "), place]];
  });
  if (from === null) { tip.remove(); return; }
  row(tip, null, from === to ? `step ${from}` : `steps ${from} to ${to}`);
  for (const [column, text, range, place] of rows) {
    const elsewhere = place.from > to || place.to < from;
    row(tip, { ink: colourOf(chart, column.line) }, elsewhere ? `${text} (step ${place.from})` : text, range);
  }
  const reach = (u.scales.x.max - u.scales.x.min) / 400;
  const happened = data.marks.filter(([step]) => step >= from - reach && step <= to + reach);
  for (const [step, kind, run, text] of new Map(happened.map((mark) => [`${mark[1]} ${mark[2]}`, mark])).values()) {
    row(tip, { class: `mark ${kind}` }, `${data.runs.length > 1 ? `${data.runs[run]}, ` : ""}step ${step}: ${text}`);
  }
  const start = u.over.offsetLeft + left;
  const room = frame.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(Math.min(start < frame.clientWidth / 2 ? start + 14 : start - tip.offsetWidth - 14, room), 0)}px`;
};

// What a finger has pointed at stays until it touches another place: where the mouse is says nothing.
// So does what a key has pointed at, until the mouse moves: a browser tells of plots that scroll beneath a mouse at rest.
let touched = false, keyed = false;
document.addEventListener("pointerdown", (event) => {
  if (touched && !active?.root.contains(event.target)) leave();
  touched = event.pointerType !== "mouse";
  keyed = false;
}, true);
document.addEventListener("pointermove", (event) => {
  if (event.pointerType === "mouse" && (event.movementX || event.movementY)) touched = keyed = false;
}, true);

const leave = () => {
  active?.setCursor({ left: -10, top: -10 });
  point(null);
};

document.addEventListener("keydown", (event) => {
  const figure = event.target.closest?.(".plot")?.closest("figure");
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const u = plots.get(figure);
  if (event.key === "Escape") leave();
  if (!u || !way) return;
  event.preventDefault();
  const goesOn = active === u;
  if (!goesOn) leave();
  keyed = true;
  point(u);
  const steps = u.data[0];
  const inside = steps.map((_, at) => at).filter((at) => steps[at] >= u.scales.x.min && steps[at] <= u.scales.x.max);
  if (!inside.length) return;
  const next = !goesOn || u.cursor.left < 0 || u.cursor.idx === null ? inside.at(way > 0 ? 0 : -1) : u.cursor.idx + way;
  const at = Math.min(Math.max(next, inside[0]), inside.at(-1));
  u.setCursor({ left: u.valToPos(steps[at], "x"), top: 20 });
});
document.addEventListener("focusout", (event) => event.target.matches?.(".plot") && leave());

