// Charts of metrics over updates, several runs over each other, on uPlot.

import { hideTip, num, showTip } from "./dom.js";

export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Exponential smoothing that corrects for its start; gaps stay gaps.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (typeof value !== "number") return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

// Wilson's 95 % interval of a share of n tasks.
export function wilson(share, n) {
  if (typeof share !== "number" || !n) return [null, null];
  const z = 1.96;
  const centre = (share + (z * z) / (2 * n)) / (1 + (z * z) / n);
  const half = (z / (1 + (z * z) / n)) * Math.sqrt((share * (1 - share)) / n + (z * z) / (4 * n * n));
  return [Math.max(0, centre - half), Math.min(1, centre + half)];
}

const units = [[86400, "d"], [3600, "h"], [60, "min"]];

// Seconds as the largest unit that they fill; ticks of one axis share that of the longest.
export function duration(value, longest = value, digits = 3) {
  const [size, unit] = units.find(([seconds]) => Math.abs(longest) >= 2 * seconds) ?? [1, "s"];
  return value === 0 ? "0" : `${num(value / size, digits)} ${unit}`;
}

export const short = (value) => (Math.abs(value) >= 1e6 ? `${num(value / 1e6, 3)} M` : Math.abs(value) >= 1e4 ? `${num(value / 1e3, 3)} k` : num(value, 3));

// Seconds between two ticks: round numbers of their unit.
const STEPS = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, ...[1, 2, 5, 10, 20, 50, 100, 200, 500].map((days) => 86400 * days)];

// What charts can be drawn over: a metric's sum so far, from the server, or the update itself.
export const AXES = {
  update: { label: "update", show: (value) => (Number.isInteger(value) ? String(value) : "") },
  tokens: { label: "sampled tokens", show: short },
  calls: { label: "tool calls", show: short },
  wall_s: { label: "time", show: (value, most) => duration(value, most), steps: STEPS },
};

// Draws values over x. series: {label, colour, values, raw, dash, points, low, high}; marks: [{x, texts}];
// names: what each x is called.
export function chart(place, { x, series, marks, range, format, sync, onPick, axis, names, height }) {
  const data = [x];
  const shapes = [{}];
  const bands = [];
  const line = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui" };
  for (const one of series) {
    const width = one.thin ? 1 : 1.75;
    shapes.push({ label: one.label, stroke: one.colour, width, dash: one.dash, spanGaps: true, points: { show: one.points ?? false, size: 6, fill: one.colour } });
    data.push(one.values);
    if (one.low) {
      const at = data.length;
      data.push(one.high, one.low);
      for (const side of ["high", "low"]) shapes.push({ label: side, stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [at, at + 1], fill: `${one.colour}30` });
    }
  }
  const drawMarks = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = css("--warn");
    for (const mark of marks) {
      const at = plot.valToPos(mark.x, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      const r = 5 * devicePixelRatio;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at - r, bbox.top - 1.6 * r);
      ctx.lineTo(at + r, bbox.top - 1.6 * r);
      ctx.fill();
      ctx.globalAlpha = 0.12;
      ctx.fillRect(at - devicePixelRatio / 2, bbox.top, devicePixelRatio, bbox.height);
      ctx.globalAlpha = 1;
    }
    ctx.restore();
  };
  const most = x.length ? x[x.length - 1] : 0;
  const options = {
    width: Math.max(200, place.clientWidth),
    height,
    padding: [12, 12, 0, 0],
    legend: { show: false },
    // A single point stands in the middle.
    scales: {
      x: { time: false, range: x.length === 1 ? (u, low, high) => [low - 0.5, high + 0.5] : undefined },
      y: { range: range ? () => range : (u, low, high) => padded(low, high) },
    },
    axes: [
      { ...line, size: 28, ...(axis.steps ? { incrs: axis.steps } : {}), values: (u, ticks) => ticks.map((tick) => axis.show(tick, most)) },
      { ...line, size: 58, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))) },
    ],
    cursor: { sync: { key: sync }, drag: { x: true, y: false }, points: { size: 7 } },
    series: shapes,
    bands,
    hooks: { draw: [drawMarks] },
  };
  const plot = new uPlot(options, data, place);
  const over = plot.over;
  over.addEventListener("mousemove", (event) => {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) return;
    const rows = [[names ? names[at] : `${axis.label} ${axis.show(x[at], most)}`]];
    for (const one of series) {
      if (one.hidden) continue;
      const place = nearest(one.raw ?? one.values, at, names !== null);
      if (place === null) continue;
      const value = (one.raw ?? one.values)[place];
      const interval = one.low && one.low[place] !== null ? ` [${format(one.low[place], 3)}, ${format(one.high[place], 3)}]` : "";
      rows.push([one.label, format(value, 5) + interval]);
    }
    for (const mark of marks) if (mark.x === x[at]) rows.push(...mark.texts.map((text) => [`⚠ ${text}`]));
    showTip(event, rows);
  });
  over.addEventListener("mouseleave", hideTip);
  let downAt = 0;
  over.addEventListener("mousedown", (event) => (downAt = event.clientX));
  over.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - downAt) < 4 && plot.cursor.idx !== null) onPick(plot.cursor.idx);
  });
  return plot;
}

// The place of a value, or of the last one before it where runs have values at places of their own.
function nearest(values, at, mayBeBefore) {
  const has = (n) => values[n] !== null && values[n] !== undefined;
  if (has(at)) return at;
  if (!mayBeBefore || !values.slice(at).some((value) => value !== null && value !== undefined)) return null;
  for (let n = at; n >= 0; n--) if (has(n)) return n;
  return null;
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  // Most numbers here are never negative, so that all zeros get an axis upwards.
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return low > 0 ? [0, 2 * high] : [2 * low, 0];
  const room = 0.06 * (high - low);
  return [low >= 0 && low < 0.35 * high ? 0 : low - room, high + room];
}
