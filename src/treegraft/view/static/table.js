// Lists that can be sorted, in pages, without the columns that say nothing.

import { note } from "./api.js";
import { h, num, replace } from "./dom.js";

const SIZE = 50;

const compare = (order, down) => (a, b) => {
  const [x, y] = [order(a), order(b)];
  if (x === y || (x == null && y == null)) return 0;
  if (x == null || y == null) return x == null ? 1 : -1;
  return (x < y ? -1 : 1) * (down ? -1 : 1);
};

const shownIn = (column, row) => (column.show ? column.show(row) : num(column.of(row)));

// A list in a place of the page. Its order, page and hidden columns stand in the address.
// columns: {key, label, of, show, title, text (left-aligned, ascending first), keep (never hidden), wide}.
export function makeList(place, { id, columns, address, query, first, down: firstDown = false, empty, rowClass = () => null }) {
  let sort = query.sort ?? first;
  let down = query.down === undefined ? firstDown : query.down === "1";
  let at = Math.max(1, Math.floor(Number(query.page)) || 1);
  let showsAll = query.all === "1";
  let rows = [];
  let made = [];

  const remember = () => note({ sort: sort === first ? "" : sort, down: down === firstDown ? "" : down ? "1" : "0", page: at > 1 ? at : "", all: showsAll ? "1" : "" });
  const change = (apply) => { apply(); remember(); paint(); };
  const turnTo = (page) => change(() => (at = page));
  const sortBy = (column) => change(() => { down = column.key === sort ? !down : !column.text; sort = column.key; at = 1; });

  function paint() {
    const column = made.find((one) => one.key === sort) ?? made[0];
    const sorted = [...rows].sort(compare(column.of, down));
    // Nothing and 0 say the same where no row has more.
    const isQuiet = (one) => {
      if (one.keep || one === column || rows.length < 2) return false;
      const values = new Set(rows.map((row) => JSON.stringify((one.same ?? one.of)(row) || 0)));
      return values.size === 1;
    };
    const word = (one) => (rows.some((row) => one.of(row)) ? shownIn(one, rows[0]) : rows.some((row) => one.of(row) === 0) ? "0" : "none");
    const quiet = made.filter(isQuiet);
    const told = showsAll ? made : made.filter((one) => !quiet.includes(one));
    const pages = Math.max(1, Math.ceil(rows.length / SIZE));
    at = Math.min(at, pages);
    const part = sorted.slice((at - 1) * SIZE, at * SIZE);
    const arrow = (one) => (one === column ? (down ? " ▼" : " ▲") : "");
    const head = told.map((one) => h("th", { class: one.text ? "text" : null, "aria-sort": one === column ? (down ? "descending" : "ascending") : null }, one.label && h("button", { onclick: () => sortBy(one), title: one.title ?? null }, one.label, arrow(one))));
    const cell = (one, row) => h("td", { class: [one.text && "text", one.wide && "wide", one.clip && "clip", one.name && "name", !one.keep && !one.of(row) && "nil"].filter(Boolean).join(" ") || null, "data-label": one.label }, one.lead ? h("a", { href: address(row) }, shownIn(one, row)) : shownIn(one, row));
    const body = part.map((row) => h("tr", { "data-href": address(row), class: rowClass(row) }, told.map((one) => cell(one, row))));
    const list = h("table", { class: `list${told.some((one) => one.wide) ? " full" : ""}`, id }, h("thead", null, h("tr", null, head)), h("tbody", null, body));
    list.addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-href]");
      if (row && !event.target.closest("a,button,input,label") && !getSelection().toString()) location.hash = row.dataset.href;
    });
    // On a phone there are no heads to click.
    const order = h("select", { class: "narrow-only", "aria-label": "sort by", onchange: (event) => sortBy(made.find((one) => one.key === event.target.value)) }, told.filter((one) => one.label).map((one) => h("option", { value: one.key }, `sort: ${one.label}`)));
    order.value = column.key;
    const pager = () => pages > 1 && h("span", { class: "pager" }, h("button", { disabled: at === 1, onclick: () => turnTo(at - 1), "aria-label": "page before" }, "‹"), ` ${(at - 1) * SIZE + 1} to ${(at - 1) * SIZE + part.length} of ${rows.length} `, h("button", { disabled: at === pages, onclick: () => turnTo(at + 1), "aria-label": "next page" }, "›"));
    const equal = quiet.length > 0 && h("span", { class: "dim equal" }, "Equal in all rows: ", quiet.map((one, n) => [n ? ", " : "", `${one.label} `, word(one)]), " ", h("button", { onclick: () => change(() => (showsAll = !showsAll)) }, showsAll ? "hide them" : "show as columns"));
    replace(place, rows.length ? [h("div", { class: "tools listtools" }, order, pager(), equal), h("div", { class: "listbox" }, list), pages > 1 && h("div", { class: "tools listtools" }, pager())] : h("p", { class: "notice" }, empty()));
    // Only a list that is too wide scrolls in a box of its own: heads that stay in sight need the page's scrolling.
    list.parentElement?.classList.toggle("scroll", list.offsetWidth > place.clientWidth);
  }

  // Draws these rows; columns may depend on them.
  return (newRows, isNew = false) => {
    rows = newRows;
    made = typeof columns === "function" ? columns(rows) : columns;
    if (isNew) at = 1;
    paint();
  };
}
