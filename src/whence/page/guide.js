// A first look: three things to see, once. Where nothing can be remembered it does not come by itself.

import { h } from "./dom.js";

const KEY = "whence-guide";

function remembered() {
  try { return localStorage.getItem(KEY); } catch { return "no storage"; }
}

let asked = false;

export function wanted() {
  return asked || remembered() === null;
}

// `again` draws the page anew; `show` opens a head.
export function guide({ again, show }) {
  const close = () => {
    asked = false;
    try { localStorage.setItem(KEY, "seen"); } catch { /* then it only came because it was asked for */ }
    again();
  };
  return h("aside", { class: "guide no-export", "aria-label": "A first look" },
    h("h2", {}, "A first look"),
    h("ol", {},
      h("li", {}, h("b", {}, "The lines below"), " say how many heads may be read on this text, and why."),
      h("li", {}, h("b", {}, "Every head is a cell. "), "The more orange, the less its attention may be read: other attention gives the same output. Click one to see its maps."),
      h("li", {}, h("b", {}, "In the Head view"), " you can move the attention yourself and watch the output stay.")),
    h("p", {}, h("button", { type: "button", class: "action", onclick: close }, "Got it"),
      show ? h("button", { type: "button", class: "link", onclick: () => { close(); show(); } }, "Show me a head") : null));
}

export function guideButton(again) {
  return h("button", { type: "button", class: "link", onclick: () => { asked = true; again(); scrollTo(0, 0); } }, "Show the first look again");
}
