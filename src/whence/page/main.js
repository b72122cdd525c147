// The page: a bar of views, the live text box where a server answers, and the view that the address names.

import { h, replace, scrollable, visible } from "./dom.js";
import { Source, embedded } from "./data.js";
import { go, onchange, start, state } from "./state.js";
import { saveSVG, savePNG } from "./export.js";
import { overviewView } from "./overview.js";
import { HeadView } from "./head.js";
import { ProvenanceView } from "./provenance.js";
import { identityView } from "./identity.js";
import { predictionView } from "./prediction.js";
import { AnswerView } from "./answer.js";
import { decisionsView } from "./decisions.js";
import { runView } from "./run.js";
import { Live } from "./live.js";
import { guide, guideButton, wanted } from "./guide.js";

const VIEWS = [["overview", "Overview"], ["head", "Head"], ["provenance", "Provenance"], ["identity", "Identity"], ["prediction", "Prediction"], ["answer", "Answer"], ["decisions", "Decisions"]];
const ABOUT = {
  overview: "Which heads may be read?", head: "What does this head look at, and must it?", provenance: "Where did this hidden state come from?",
  identity: "Is this token still itself?", prediction: "What did the output come from?",
  answer: "What did the answer come from?", decisions: "Does the computation fix what was decided from attention?",
};

const KEYS = { overview: "the grid of heads", head: "maps and text", provenance: "the text", identity: "tables", prediction: "tables", answer: "the answer and the map", decisions: "tables" };

const EXAMPLES = [
  "The old doctor told the nurse that she would not leave the ward before the storm was over, because the roads to the village had been closed since noon and nobody knew when they would open again.",
  "The trophy did not fit into the brown suitcase because it was too large, so we bought another suitcase, and then the trophy looked small, and nobody remembered why we had wanted to carry it home at all.",
  "When the committee that had examined the report which the engineers had written came back, it was clear that nobody had read the last page, where the only figure that mattered stood in a footnote.",
];

const root = document.getElementById("whence");
let source = null, live = null, kept = {};

function stackOf() {
  const { stacks } = source.manifest;
  return stacks.find((s) => s.name === state.stack) ?? stacks[0];
}

function runNamed(name) {
  return source?.manifest.runs?.find((run) => run.name === name);
}

function view() {
  const stack = stackOf();
  const name = available().some(([k]) => k === state.view) ? state.view : available()[0][0];
  const paint = document.documentElement.dataset.theme;
  if (kept.source !== source || kept.stack !== stack || kept.paint !== paint) kept = { source, stack, paint };
  const run = runNamed(name);
  if (run) return [name, runView(run)];
  if (name === "head") { kept.head ??= new HeadView(source, stack); kept.head.update(); return [name, kept.head.el]; }
  if (name === "provenance") { kept.provenance ??= new ProvenanceView(source); kept.provenance.update(); return [name, kept.provenance.el]; }
  if (name === "identity") return [name, identityView(source)];
  if (name === "prediction") return [name, predictionView(source)];
  if (name === "answer") { kept.answer ??= new AnswerView(source); kept.answer.update(); return [name, kept.answer.el]; }
  if (name === "decisions") return [name, decisionsView(source)];
  const overview = overviewView(source, stack);
  if (wanted()) overview.prepend(guide({ again: draw, show: () => go({ view: "head", layer: "", head: "", query: "" }, { push: true }) }));
  return [name, overview];
}

function available() {
  const { prediction, answer, decisions, stacks: found, runs } = source?.manifest ?? {};
  const there = { prediction: Boolean(prediction), answer: Boolean(answer), decisions: Boolean(decisions?.length) };
  const own = found?.length ? VIEWS.filter(([name]) => there[name] ?? true) : [];
  return [...own, ...(runs ?? []).map((run) => [run.name, run.title])];
}

const tabs = scrollable(h("nav", { class: "tabs", "aria-label": "Views" }));
const heading = h("div", { class: "heading" });
const main = h("main", { id: "main", tabindex: "-1" });
const stacks = h("div", { class: "stack-choice" });
const footer = h("footer", {});
const message = h("div", { class: "message", role: "status", "aria-live": "polite" });

function focusKey(element) {
  if (!element || !main.contains(element)) return null;
  if (element.type === "radio") return `input[type=radio][value="${CSS.escape(element.value)}"]`;
  return null;
}

function draw() {
  if (!source) return;
  const focused = focusKey(document.activeElement);
  const [name, element] = view();
  replace(tabs, available().map(([key, title]) => h("button", { type: "button", class: "tab", "aria-current": key === name ? "page" : undefined, onclick: () => go({ view: key }, { push: true }) }, title)));
  const current = tabs.querySelector("[aria-current]"); // on a phone not all fit
  tabs.scrollLeft = Math.max(0, current.offsetLeft - tabs.offsetLeft + current.offsetWidth - tabs.clientWidth);
  const { manifest } = source;
  const run = runNamed(name), stack = stackOf();
  replace(heading, h("h1", {}, run?.about ?? ABOUT[name]),
    h("p", { class: "context" }, h("b", {}, visible(run?.model ?? manifest.model)), run ? ` · ${visible(run.context)}` : ` · ${stack.tokens.text.length} tokens · ${stack.layers.length} layers × ${stack.heads.length} heads of ${stack.head_size}`,
      h("span", { class: "view-export no-export" },
        h("button", { type: "button", class: "quiet", onclick: () => saveSVG(main, `whence-${name}`, heading) }, "View as SVG"),
        h("button", { type: "button", class: "quiet", onclick: () => savePNG(main, `whence-${name}`, heading) }, "View as PNG"))));
  replace(stacks, manifest.stacks.length > 1 ? manifest.stacks.map((s) => h("button", { type: "button", class: "tab small", "aria-pressed": s === stackOf() ? "true" : "false", onclick: () => go({ stack: s.name, layer: "", head: "", query: "" }) }, s.name)) : "");
  if (main.firstChild !== element) replace(main, element);
  if (kept.view && kept.view !== name) scrollTo(0, 0); // another view begins at its beginning
  kept.view = name;
  const { versions } = manifest;
  replace(footer, h("p", {}, `Keys: ${available().length > 1 ? `1–${available().length} choose a view, ` : ""}${name === "head" ? "[ and ] step through the heads, " : ""}arrows move within ${KEYS[name] ?? "tables"}. `, name === "overview" ? [guideButton(draw), ". "] : "",
    `Made with whence ${versions.whence}, torch ${versions.torch}, transformers ${versions.transformers}.`));
  if (focused) main.querySelector(focused)?.focus({ preventScroll: true });
  document.title = `${available().find(([k]) => k === name)[1]} · ${visible((manifest.text ?? "").slice(0, 50))} · ${manifest.model} · whence`;
}

function themeButton() {
  const names = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
  const order = ["", "light", "dark"];
  const set = (value) => {
    if (value) document.documentElement.dataset.theme = value; else delete document.documentElement.dataset.theme;
    button.textContent = names[value];
    try { localStorage.setItem("whence-theme", value); } catch { /* a page without storage forgets it */ }
    kept = {};
    draw();
  };
  const button = h("button", { type: "button", class: "quiet theme", onclick: () => set(order[(order.indexOf(document.documentElement.dataset.theme ?? "") + 1) % 3]) }, names[""]);
  let saved = "";
  try { saved = localStorage.getItem("whence-theme") ?? ""; } catch { /* as above */ }
  if (saved in names) { button.textContent = names[saved]; if (saved) document.documentElement.dataset.theme = saved; }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { kept = {}; draw(); });
  return button;
}

function textBox() {
  const area = h("textarea", { id: "text", rows: 3, maxlength: live.limits.text, placeholder: "Any text", spellcheck: "false", dir: "auto" });
  area.value = state.text;
  const model = h("select", { id: "model" }, live.models.map((m) => h("option", { value: m.name, selected: m.name === state.model }, m.name)));
  const pair = h("input", { type: "text", maxlength: live.limits.text, dir: "auto", value: state.pair || live.pair }), target = h("input", { type: "text", maxlength: live.limits.text, dir: "auto", value: state.target });
  const continuation = h("input", { type: "text", maxlength: live.limits.text, dir: "auto", value: state.continuation });
  const write = h("input", { type: "number", min: 1, max: 256, step: 1, value: state.write }), chat = h("input", { type: "checkbox", checked: Boolean(state.chat) });
  const field = (words, input) => h("label", { class: "field" }, h("span", {}, words), input);
  const more = h("details", { class: "ask-more", open: Boolean(pair.value || state.target || state.continuation || state.write || state.chat) }, h("summary", {}, "An answer to explain, a second text, decoder text"),
    field("The answer to this prompt, for models that write", continuation), field("Or let the model write so many tokens", write), field("Put the prompt through its chat template", chat),
    field("Second text, for models that read two", pair), field("What an encoder–decoder’s decoder reads", target));
  const epsilon = h("input", { type: "number", id: "epsilon", min: 0.001, max: 0.999, step: "any", value: state.epsilon || "0.05", title: "How far a weight may be uncertain and still be read" });
  const run = h("button", { type: "submit", class: "action" }, "Look");
  const stop = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => live.cancel() }, "Cancel");
  const bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
  const look = async () => {
    if (!area.value.trim()) { replace(message, "Give a text first."); return; }
    run.disabled = true;
    stop.hidden = bar.hidden = false;
    replace(message, "Waiting …");
    go({ text: area.value, model: model.value, pair: pair.value, target: target.value, continuation: continuation.value, write: write.value, chat: chat.checked ? "yes" : "", epsilon: Number(epsilon.value) === 0.05 ? "" : epsilon.value });
    try {
      source = await live.open({ model: model.value, text: area.value, text_pair: pair.value || null, target: target.value || null, continuation: continuation.value || null, max_new_tokens: write.value ? Number(write.value) : null, chat: chat.checked, epsilon: Number(epsilon.value) }, (job) => { bar.value = job.progress; replace(message, `${job.message} …`); });
      replace(message, "");
      draw();
    } catch (error) {
      replace(message, h("span", { class: "problem" }, error.message));
    } finally {
      run.disabled = false;
      stop.hidden = bar.hidden = true;
    }
  };
  const form = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); look(); } },
    h("label", { class: "hidden", for: "text" }, "Text"), area,
    h("div", { class: "ask-row" }, h("label", { for: "model" }, "Model"), model, h("label", { for: "epsilon" }, "certain to ε ="), epsilon, run, stop, bar), more);
  area.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); look(); } });
  const examples = h("ul", { class: "examples" }, EXAMPLES.map((text) => h("li", {}, h("button", { type: "button", class: "link", onclick: () => { area.value = text; look(); } }, text))));
  return { form, look, examples };
}

function keys(event) {
  if (!source || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  const found = available()[Number(event.key) - 1];
  if (found) { go({ view: found[0] }, { push: true }); event.preventDefault(); return; }
  if (state.view === "head" && kept.head?.step && (event.key === "[" || event.key === "]")) kept.head.step(event.key === "]" ? 1 : -1);
}

async function open() {
  start();
  source = embedded();
  const box = h("div", {});
  replace(root,
    h("a", { class: "skip", href: "#main", onclick: (event) => { event.preventDefault(); main.focus(); } }, "Skip to the content"),
    h("header", { class: "top" }, h("div", { class: "bar" }, h("span", { class: "brand" }, "whence"), tabs, themeButton())), box,
    h("div", { class: "page" }, message, heading, stacks, main, footer));
  onchange(draw);
  addEventListener("keydown", keys);
  if (!source) {
    try { live = await Live.connect(); } catch (error) { replace(message, `The server does not answer: ${error.message}`); return; }
    const { form, look, examples } = textBox();
    replace(box, form);
    replace(heading, h("h1", {}, "Where did this hidden state come from, and may its attention be read?"), h("p", { class: "context" }, "Give a text; the model answers on this machine. Or begin with one of these:"));
    replace(main, examples);
    if (live.runs.length) source = new Source({ model: live.runs[0].model, text: "", stacks: [], runs: live.runs, versions: live.versions }, async () => null, live);
    if (state.text) await look();
  }
  draw();
  root.dataset.ready = "true";
}

open();
