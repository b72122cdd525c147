// Tokens as running text: readable, shaded, and to be picked with mouse or keyboard.

import { h, scrollable, visible } from "./dom.js";
import { colour, css, ink, theme } from "./colour.js";

const RTL = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufeff]/g;
const LTR = /[A-Za-z\u00c0-\u058f\u0900-\u1fff\u3040-\ud7ff]/g;

export function direction(tokens) {
  const text = tokens.text.filter((_, i) => !tokens.special[i]).join(" ");
  return (text.match(RTL) ?? []).length > (text.match(LTR) ?? []).length ? "rtl" : "ltr";
}

// For use within a sentence. What is written from right to left is set apart, or the numbers after it would join it.
export function tokenName(tokens, i) {
  const text = visible(tokens.text[i] ?? "");
  if (tokens.special[i]) return text;
  const word = tokens.word?.[i];
  return apart(`‘${text}’`) + (word ? ` (in ${apart(`‘${visible(word)}’`)})` : "");
}

function apart(text) {
  return text.search(RTL) < 0 ? text : `\u2068${text}\u2069`;
}

// For an axis: as short as it can be; a dot where the word goes on.
export function tokenLabel(tokens, i) {
  const text = visible(tokens.text[i] ?? "").trim() || "␣";
  const word = tokens.word?.[i];
  const begins = i > 0 && word && tokens.word[i - 1] === word && tokens.glued[i] ? "·" : "";
  const ends = word && tokens.word[i + 1] === word && tokens.glued[i + 1] ? "·" : "";
  return `${begins}${text}${ends}`;
}

const SHADES = 64;

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
    if (i > 0 && tokens.glued[i]) { span.classList.add("glued"); spans[i - 1].classList.add("joins"); }
    children.push(span);
  });
  const element = h("p", {
    class: `tokens${onpick ? " pick" : ""}${compact ? " compact" : ""}`,
    dir: direction(tokens), role: onpick ? "listbox" : undefined, "aria-label": onpick ? label : undefined,
    "aria-orientation": onpick ? "horizontal" : undefined,
  }, children);
  if (!compact || tokens.text.length > 200) scrollable(element);
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
    if (spans[current]) { spans[current].setAttribute("aria-selected", "false"); spans[current].tabIndex = -1; spans[current].classList.remove("chosen"); }
    current = i;
    if (spans[i]) {
      if (onpick) { spans[0].tabIndex = -1; spans[i].setAttribute("aria-selected", "true"); spans[i].tabIndex = 0; }
      spans[i].classList.add("chosen");
    }
  };
  // Only the tokens whose shade changes are touched: most have next to no weight, whatever the row.
  const levels = new Int16Array(spans.length).fill(-1000);
  let painted = "";
  element.shade = (values, { max, curve = "linear", digits = 3 } = {}) => {
    const most = max ?? values.reduce((m, v) => Math.max(m, Math.abs(v)), 1e-12);
    shown = { values, digits };
    if (painted !== theme()) { painted = theme(); levels.fill(-1000); }
    for (let i = 0; i < spans.length; i++) {
      const share = Math.max(-1, Math.min(1, (values[i] ?? 0) / most)) || 0;
      const level = Math.round(SHADES * (curve === "root" ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share));
      if (level === levels[i]) continue;
      levels[i] = level;
      const { style } = spans[i];
      if (level === 0) { style.backgroundColor = style.color = ""; continue; }
      const found = colour(level / SHADES);
      style.backgroundColor = css(found);
      style.color = ink(found);
    }
  };
  return element;
}
