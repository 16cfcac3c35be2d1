// Elements from code. Text always becomes a text node: nothing that a model wrote is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

export function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

export function replace(element, ...children) {
  element.replaceChildren();
  return add(element, children);
}

// Control characters and changes of direction are shown, so that foreign text cannot rearrange the page.
export function plain(text) {
  return String(text ?? "").replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (c) => {
    const code = c.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : code === 127 ? "\u2421" : "\ufffd";
  });
}

export const flat = (text, most = 200) => {
  const one = plain(text).replace(/\s+/g, " ").trim();
  return one.length > most ? one.slice(0, most - 1) + "…" : one;
};

export const num = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return String(Number(value.toPrecision(digits)));
};
export const signed = (value, digits = 3) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + num(value, digits));
// A reward or an advantage: two decimals, or one digit of what would read as 0.
export const score = (value, isSigned = false) => (value === null || value === undefined ? "–" : (isSigned && value > 0 ? "+" : "") + (value !== 0 && Math.abs(value) < 0.005 ? num(value, 1) : value.toFixed(2)).replace(/^-/, "−"));
export const percent = (value) => (typeof value === "number" ? `${num(100 * value, 3)} %` : "–");
export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

// ---- one tooltip for the page

const tip = document.getElementById("tip");

export function showTip(event, rows) {
  replace(tip, rows.map(([name, value]) => (value === undefined ? h("p", null, name) : h("div", null, h("span", null, name), h("b", null, value)))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
  const top = event.clientY + 16 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

export function hideTip() {
  tip.hidden = true;
}
