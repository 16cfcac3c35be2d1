// Requests to the server, and addresses of pages. An address holds all that its page shows.

const set = (query) => Object.entries(query ?? {}).filter(([, value]) => value !== "" && value !== null && value !== undefined);

export async function get(path, query) {
  const text = new URLSearchParams(set(query)).toString();
  const answer = await fetch(`api/${path}${text ? `?${text}` : ""}`);
  const data = await answer.json();
  if (!answer.ok) throw new Error(data.error ?? `the server answered ${answer.status}`);
  return data;
}

export const runPath = (run, rest = "") => `runs/${encodeURIComponent(run)}${rest}`;

export function link(parts, query) {
  const text = new URLSearchParams(set(query)).toString();
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}${text ? `?${text}` : ""}`;
}

export const to = {
  overview: (query) => link([], query),
  runs: (query) => link(["runs"], query),
  settings: (query) => link(["settings"], query),
  updates: (run) => link(["r", run]),
  groups: (run, file, query) => link(["r", run, "t", file], query),
  tree: (run, file, n, query) => link(["r", run, "t", file, n], query),
};

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)) };
}

// Changes the address without a new page, so that it can be copied at any moment.
export function note(changes) {
  const { parts, query } = here();
  history.replaceState(history.state, "", link(parts, { ...query, ...changes }));
}

export function fileTitle(name) {
  const [kind, update, which] = name.split("-");
  return kind === "update" ? `update ${Number(update)}` : `evaluation after update ${Number(update)}, ${which}`;
}
