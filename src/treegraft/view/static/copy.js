// A trajectory to take away: as text, or as chat messages in the shape of OpenAI's chat completions.

import { h } from "./dom.js";

// A call's text as JSON, if it is an object already; else under one name, as importers of traces read it.
function callArguments(body) {
  try {
    const parsed = JSON.parse(body);
    if (parsed !== null && typeof parsed === "object" && !Array.isArray(parsed)) return body;
  } catch {
    // Not JSON: the text of a call in tags.
  }
  return JSON.stringify({ input: body });
}

export function messagesOf(tree, path) {
  const found = [{ role: "user", content: tree.task.question }];
  for (const step of path.slice(1)) {
    const { thought, calls, observations, answer } = step.content;
    const message = { role: "assistant", content: answer ?? (calls.length ? "" : thought || step.wrote || "") };
    if (thought && (calls.length || answer !== null)) message.reasoning_content = thought;
    if (calls.length) message.tool_calls = calls.map((call, n) => ({ id: `${step.id}-${n}`, type: "function", function: { name: call.name, arguments: callArguments(call.body.trim()) } }));
    found.push(message, ...observations.map((seen, n) => ({ role: "tool", tool_call_id: `${step.id}-${n}`, content: seen.text })));
  }
  return found;
}

export function textOf(tree, path) {
  const lines = [`Question: ${tree.task.question}`];
  for (const step of path.slice(1)) {
    const { thought, calls, observations, answer } = step.content;
    lines.push("", `Step ${step.id}${step.cause?.kind === "graft" ? ` (retrieved from ${step.cause.source})` : ""}`);
    if (thought.trim()) lines.push(`Thought: ${thought.trim()}`);
    calls.forEach((call, n) => {
      lines.push(`${call.name}: ${call.body.trim()}`);
      if (observations[n]) lines.push(`Result: ${observations[n].text}`);
    });
    if (answer !== null && answer !== undefined) lines.push(`Answer: ${answer}`);
    if (!thought && !calls.length && answer === null && step.wrote) lines.push(step.wrote);
  }
  return `${lines.join("\n")}\n`;
}

// To the clipboard; browsers refuse it on pages from another machine, where the text is shown to be copied by hand.
export async function copy(text, button = null) {
  try {
    await navigator.clipboard.writeText(text);
    if (!button) return;
    const before = button.textContent;
    button.textContent = "copied";
    setTimeout(() => (button.textContent = before), 1200);
  } catch {
    const field = h("textarea", { readonly: true, rows: 16, cols: 80, "aria-label": "the trajectory" });
    field.value = text;
    const shown = h("dialog", { class: "copied", onclose: () => shown.remove() }, h("p", null, "The browser does not let this page copy. Select the text and copy it:"), field, h("form", { method: "dialog" }, h("button", null, "close")));
    document.body.append(shown);
    shown.showModal();
    field.select();
  }
}
