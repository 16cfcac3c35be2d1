// Which runs are compared, and their colours: the same on every page, and used for nothing else.

import { css } from "./charts.js";

// Runs that are chosen at first: as many as there are colours.
const MOST = 8;
let names = null;
const slots = new Map();

// Names in an address: one may hold a comma.
export const joined = (names) => names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",");
const split = (text) => text.split(",").map((name) => name.replace(/%25|%2C/g, decodeURIComponent));

// The runs of an address; else those chosen before; else the first, with which others are compared, and the newest few.
export function chosenRuns(runs, query) {
  const known = (some) => some.filter((name) => runs.some((run) => run.name === name));
  if (query.runs !== undefined) names = known(split(query.runs));
  else if (names === null) {
    const readable = runs.filter((run) => !run.error);
    const written = readable.filter((run) => run.num_lines > 0);
    const whole = written.length ? written : readable;
    const newest = whole.slice(1).sort((a, b) => b.newest - a.newest).slice(0, MOST - 1);
    names = whole.filter((run, n) => n === 0 || newest.includes(run)).map((run) => run.name);
  } else names = known(names);
  // A run keeps its colour as long as it is chosen.
  for (const name of [...slots.keys()]) if (!names.includes(name)) slots.delete(name);
  for (const name of names) {
    if (slots.has(name)) continue;
    const taken = [...slots.values()];
    let slot = 0;
    while (taken.includes(slot)) slot++;
    slots.set(name, slot);
  }
  return names;
}

export const colourOf = (name) => (slots.has(name) ? css(`--run${slots.get(name) % MOST}`) : css("--dim"));
