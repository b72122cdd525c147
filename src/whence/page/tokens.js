// Tokens as running text: readable, shaded, and to be picked with mouse or keyboard.

import { h, visible } from "./dom.js";
import { paint } from "./colour.js";

const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/g;
const LTR = /[A-Za-z\u00c0-\u058f\u0900-\u1fff\u3040-\ud7ff]/g;

export function direction(tokens) {
  const text = tokens.text.filter((_, i) => !tokens.special[i]).join(" ");
  return (text.match(RTL) ?? []).length > (text.match(LTR) ?? []).length ? "rtl" : "ltr";
}

export function tokenName(tokens, i) {
  const text = visible(tokens.text[i] ?? "");
  return tokens.special[i] ? text : `‘${text}’`;
}

// {tokens, label, onpick, onhover}: the element has `.shade(values, {max, curve})` and `.select(i)`.
export function tokenText({ tokens, label, onpick, onhover, compact }) {
  const spans = tokens.text.map((text, i) => h("span", {
    class: `token${tokens.special[i] ? " special" : ""}`,
    role: onpick ? "option" : undefined,
    tabindex: onpick ? "-1" : undefined,
    "aria-selected": onpick ? "false" : undefined,
    "data-i": i,
  }, visible(text)));
  const children = [];
  spans.forEach((span, i) => {
    if (i > 0 && !tokens.glued[i]) children.push(" ");
    if (tokens.glued[i]) { span.classList.add("glued"); spans[i - 1].classList.add("joins"); }
    children.push(span);
  });
  const element = h("p", {
    class: `tokens${onpick ? " pick" : ""}${compact ? " compact" : ""}`,
    dir: direction(tokens), role: onpick ? "listbox" : undefined, "aria-label": onpick ? label : undefined,
    "aria-orientation": onpick ? "horizontal" : undefined,
  }, children);
  let current = -1, shown = null;
  const find = (event) => {
    const span = event.target.closest?.(".token");
    return span ? Number(span.dataset.i) : -1;
  };
  if (onpick) {
    if (spans.length) spans[0].tabIndex = 0;
    element.addEventListener("click", (event) => { const i = find(event); if (i >= 0) { onpick(i); spans[i].focus({ preventScroll: true }); } });
    element.addEventListener("keydown", (event) => {
      const back = element.dir === "rtl" ? "ArrowRight" : "ArrowLeft", on = element.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
      const step = { [on]: 1, ArrowDown: 1, [back]: -1, ArrowUp: -1 }[event.key];
      const from = find(event);
      let next = null;
      if (step && from >= 0) next = Math.max(0, Math.min(spans.length - 1, from + step));
      else if (event.key === "Home") next = 0;
      else if (event.key === "End") next = spans.length - 1;
      else if (event.key === "Enter" || event.key === " ") next = from;
      if (next === null || next < 0) return;
      event.preventDefault();
      event.stopPropagation();
      onpick(next);
      spans[next].focus();
    });
  }
  // Written when it is pointed at: five hundred titles at every move would be felt.
  element.addEventListener("pointerover", (event) => {
    const i = find(event);
    if (i < 0) return;
    const raw = tokens.raw[i] === tokens.text[i] ? "" : `  (raw: ${visible(tokens.raw[i])})`;
    spans[i].title = `${i}: ${visible(tokens.text[i])}${raw}${shown ? `  ${(shown.values[i] ?? 0).toFixed(shown.digits)}` : ""}`;
  });
  if (onhover) {
    element.addEventListener("pointerover", (event) => { const i = find(event); if (i >= 0) onhover(i); });
    element.addEventListener("pointerleave", () => onhover(-1));
  }
  element.select = (i) => {
    if (current >= 0 && spans[current]) { spans[current].setAttribute("aria-selected", "false"); spans[current].tabIndex = -1; }
    current = i;
    if (spans[i]) {
      if (onpick) { spans[i].setAttribute("aria-selected", "true"); spans.forEach((s) => { s.tabIndex = -1; }); spans[i].tabIndex = 0; }
      spans.forEach((s, k) => s.classList.toggle("chosen", k === i));
    }
  };
  element.shade = (values, { max, curve = "linear", digits = 3 } = {}) => {
    const most = max ?? Math.max(1e-12, ...values.map(Math.abs));
    shown = { values, digits };
    spans.forEach((span, i) => paint(span, (values[i] ?? 0) / most, curve));
  };
  element.plain = () => spans.forEach((span) => { span.style.backgroundColor = ""; span.style.color = ""; });
  return element;
}
