// Charts of metrics over updates, several runs over each other, on uPlot.

import { hideTip, num, showTip } from "./dom.js";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const runColour = (index) => css(`--run${index % 6}`);

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

// series: {label, colour, values, raw, dash, points, low, high, stacked}; x: updates; marks: [{x, texts}]
export function chart(place, { x, series, marks = [], range, format = num, sync, onPick, stacked = false }) {
  const data = [x];
  const shapes = [{}];
  const bands = [];
  const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "12px system-ui" };
  for (const one of series) {
    const width = one.thin ? 1 : 1.75;
    shapes.push({ label: one.label, stroke: one.colour, width, dash: one.dash, spanGaps: true, points: { show: !stacked && (one.points ?? false), size: 6, fill: one.colour }, ...(stacked ? { fill: one.colour, width: 0, paths: uPlot.paths.bars({ size: [0.75, 40] }) } : {}) });
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
    for (const mark of marks) {
      ctx.fillStyle = mark.colour ?? css("--warn");
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
  const options = {
    width: Math.max(200, place.clientWidth),
    height: 190,
    padding: [12, 12, 0, 0],
    legend: { show: false },
    // Bars stand on zero and need half a column on either side.
    scales: { x: { time: false, range: stacked ? (u, low, high) => [low - 0.5, high + 0.5] : undefined }, y: { range: range ? () => range : (u, low, high) => (stacked ? [0, 1.06 * (high || 1)] : padded(low, high)) } },
    axes: [
      { ...axis, size: 28, values: (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
      { ...axis, size: 54, values: (u, ticks) => ticks.map((tick) => format(tick, 3)) },
    ],
    cursor: { sync: sync ? { key: sync } : undefined, drag: { x: true, y: false }, points: { size: 7 } },
    series: shapes,
    bands,
    hooks: { draw: [drawMarks] },
  };
  const plot = new uPlot(options, data, place);
  const over = plot.over;
  over.addEventListener("mousemove", (event) => {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) return;
    const rows = [[`update ${x[at]}`]];
    for (const one of series) {
      const value = (one.raw ?? one.values)[at];
      if (value === null || value === undefined) continue;
      const interval = one.low && one.low[at] !== null ? ` [${format(one.low[at], 3)}, ${format(one.high[at], 3)}]` : "";
      rows.push([one.label, format(value, 5) + interval]);
    }
    for (const mark of marks) if (mark.x === x[at]) rows.push(...mark.texts.map((text) => [`⚠ ${text}`]));
    showTip(event, rows);
  });
  over.addEventListener("mouseleave", hideTip);
  let downAt = 0;
  over.addEventListener("mousedown", (event) => (downAt = event.clientX));
  over.addEventListener("click", (event) => {
    if (onPick && Math.abs(event.clientX - downAt) < 4 && plot.cursor.idx !== null) onPick(x[plot.cursor.idx]);
  });
  return plot;
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  // Most numbers here are never negative, so that all zeros get an axis upwards.
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const room = 0.06 * (high - low);
  return [low >= 0 && low < 0.35 * high ? 0 : low - room, high + room];
}
