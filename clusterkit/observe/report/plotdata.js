// What the plots of a page share: their state, numbers as text, lines and columns of a plot, values as a table.
// The three files of plots are one script; names and messages of a run are set as text, never as markup.
const KEPT = "clusterkit.plots";
const ODD = { save: 0.12, recover: 0.05, restart: 1 }; // height of marks, as a share of the plot
const AHEAD = "600px 0px"; // what is about to be scrolled to is drawn already
const state = { zoom: null, smooth: 0, log: false, hidden: [], added: [], wide: new Set(), off: new Set() };
const plots = new Map(); // figure -> its plot
let data = null; // what this page has of its runs
let active = null; // the plot that is pointed at

const byId = (id) => document.getElementById(id);
const titleOf = (figure) => figure.querySelector("h3").firstChild.textContent.trim();
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Numbers as text

const short = (value) => {
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${+(value / (unit === "k" ? 1e3 : limit)).toPrecision(5)}${unit}`;
  }
  if (size && size < 1e-3) return (+value.toPrecision(5)).toExponential().replace("e+", "e");
  return String(+value.toPrecision(5));
};

// A tick has the digits that tell it from its neighbours, and no more.
const tick = (value, apart) => {
  if (value === null || !value) return value === 0 ? "0" : "";
  const digits = Math.floor(Math.log10(Math.abs(value))) - Math.floor(Math.log10(apart)) + 2;
  return short(+value.toPrecision(Math.min(Math.max(digits, 1), 15)));
};

// Lines

// As TensorBoard: an average that forgets, corrected for its beginning.
const smoothed = (values) => {
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = sum * state.smooth + (1 - state.smooth) * value;
    weight = weight * state.smooth + (1 - state.smooth);
    return sum / weight;
  });
};

// The numbers of these names, in their order; * is any part of one.
const fits = (wanted) => [...new Set(wanted.flatMap((one) => {
  const rule = new RegExp(`^${one.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`);
  return Object.keys(data.numbers).filter((name) => rule.test(name));
}))];

// Lines of a plot as {names, place, run, x, mean, low, high}; equal ones of a run are one line with both names.
const linesOf = (chart, all = false) => {
  const found = [];
  chart.names.forEach((name, place) => (data.numbers[name] ?? []).forEach((line) => {
    if (chart.stacked !== null ? line.run !== chart.stacked : !all && state.hidden.includes(data.runs[line.run])) return;
    if (!line.mean.length) return;
    const twin = chart.stacked === null && found.find((one) => one.run === line.run && one.grid === line.grid &&
      one.mean.every((value, at) => value === line.mean[at]));
    if (twin) twin.names.push(name);
    else found.push({ ...line, names: [name], place });
  }));
  return found;
};

const isOf = (chart) => data.runs.length > 1 && chart.stacked === null;
const labelOf = (chart, line) => line.names.join(" = ") + (isOf(chart) ? ` ${data.runs[line.run]}` : "");
const colourOf = (chart, line) => {
  const number = isOf(chart) ? line.run : line.place; // of one run every number has a colour, else every run
  return number < 7 ? colour(`--c${number}`) : `hsl(${(number * 137.5) % 360} 60% 50%)`;
};
const dashOf = (chart, line) => (isOf(chart) ? [[], [6, 4], [2, 3]][line.place % 3] : []);

// Columns of a plot: its data joined over the steps of its lines. `kind`: low, high, raw (not smoothed) or line.
const columnsOf = (chart) => {
  const lines = linesOf(chart);
  const columns = [], tables = [];
  for (const line of lines) {
    const [first, last = first] = data.grids[line.grid];
    const steps = first.map((from, at) => (from + last[at]) / 2);
    const kinds = [["line", state.smooth ? smoothed(line.mean) : line.mean]];
    if (chart.stacked === null && state.smooth) kinds.unshift(["raw", line.mean]);
    if (chart.stacked === null && line.low) kinds.unshift(["low", line.low], ["high", line.high]);
    for (const [kind, values] of kinds) columns.push({ kind, line, first, last });
    tables.push([steps, ...kinds.map(([, values]) => values)]);
  }
  const joined = tables.length ? uPlot.join(tables) : [[]];
  columns.forEach((column, at) => { column.values = joined[at + 1]; });
  if (chart.stacked !== null) stack(columns, joined);
  if (state.log && chart.stacked === null) {
    for (let at = 1; at < joined.length; at++) joined[at] = joined[at].map((value) => (value > 0 ? value : null));
  }
  return { columns, joined };
};

// Areas on one another: the highest is drawn first, those below cover it.
const stack = (columns, joined) => {
  const sums = joined[0].map(() => 0);
  const tops = columns.map(({ values }) => values.map((value, at) => (sums[at] += value ?? 0)));
  columns.reverse();
  joined.splice(1, tops.length, ...tops.reverse());
};

// Values as a table: a row for every run and steps, a column for every number.
const csv = (charts) => {
  const columns = [], rows = new Map();
  for (const name of new Set(charts.flatMap((chart) => chart.names))) {
    for (const line of data.numbers[name] ?? []) {
      if (charts.every(({ stacked }) => stacked !== null && stacked !== line.run)) continue;
      const [first, last = first] = data.grids[line.grid];
      for (const part of line.low ? ["mean", "low", "high"] : ["mean"]) {
        const label = part === "mean" ? name : `${name} ${part}`;
        if (!columns.includes(label)) columns.push(label);
        first.forEach((step, at) => {
          const key = `${line.run} ${String(step).padStart(12, "0")} ${last[at]}`;
          if (!rows.has(key)) rows.set(key, { run: data.runs[line.run], first_step: step, last_step: last[at] });
          rows.get(key)[label] = line[part][at];
        });
      }
    }
  }
  // A text that begins as a formula does is none for a spreadsheet with a ' before it.
  const cell = (value) => (typeof value === "number" ? String(value)
    : `"${`${/^[=+\-@\t\r]/.test(value) ? "'" : ""}${value}`.replaceAll('"', '""')}"`);
  const header = ["run", "first_step", "last_step", ...columns];
  const body = [...rows.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((key) => rows.get(key));
  return [header.map(cell), ...body.map((one) => header.map((name) => (one[name] === undefined ? "" : cell(one[name]))))]
    .map((line) => `${line.join(",")}\r\n`).join("");
};

