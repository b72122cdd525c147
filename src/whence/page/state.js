// What is looked at. It lives in the address, so that a link opens the same view.

const DEFAULTS = {
  view: "overview", stack: "", layer: "", head: "", query: "", quantity: "certain", curve: "root", map: "",
  method: "", compare: "", hidden: "", at: "", model: "", text: "", pair: "", target: "", epsilon: "",
  answer: "", explain: "", unit: "token", continuation: "", write: "", chat: "",
};

const listeners = new Set();

export const state = { ...DEFAULTS };

function read() {
  const found = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(DEFAULTS)) state[name] = found.get(name) ?? DEFAULTS[name];
}

function address() {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) if (value !== DEFAULTS[name]) found.set(name, value);
  return `#${found}`;
}

function write(changes, push) {
  for (const [name, value] of Object.entries(changes)) state[name] = String(value ?? "");
  const next = address();
  if (next === location.hash) return;
  try {
    history[push ? "pushState" : "replaceState"](null, "", next);
  } catch {
    // a page without an address (about:srcdoc in a notebook) keeps its state to itself
  }
}

export function go(changes, { push = false } = {}) {
  write(changes, push);
  for (const listener of listeners) listener();
}

// What is shown already, made part of the address.
export function note(changes) {
  write(changes, false);
}

export function onchange(listener) {
  listeners.add(listener);
}

export function start() {
  read();
  addEventListener("popstate", () => { read(); for (const listener of listeners) listener(); });
  addEventListener("hashchange", () => { read(); for (const listener of listeners) listener(); });
}

export function asNumber(value, among, otherwise) {
  const found = value === "" ? NaN : Number(value);
  return among.includes(found) ? found : otherwise;
}
