// Colour-blind-safe scales (after ColorBrewer's Blues and Oranges): blue is positive, orange negative, paper is zero.

const STOPS = {
  light: {
    positive: ["#ffffff", "#d3e3f3", "#86b9e0", "#2f7dbd", "#0d4a8c", "#062a5c"],
    negative: ["#ffffff", "#fbe0c2", "#f5b271", "#e0771c", "#a8490a", "#632605"],
  },
  dark: {
    positive: ["#17191e", "#24507f", "#3579bd", "#5ea2e2", "#9ccbf6", "#eef7ff"],
    negative: ["#17191e", "#6a3a10", "#a45a14", "#d9822b", "#f5b877", "#fff0de"],
  },
};

export function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function channels(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

const tables = new Map();
const STEPS = 256;

// 513 colours, from −1 to 1, as [r, g, b].
function table(name) {
  if (tables.has(name)) return tables.get(name);
  const out = [];
  for (let i = -STEPS; i <= STEPS; i++) {
    const stops = STOPS[name][i < 0 ? "negative" : "positive"].map(channels);
    const place = (Math.abs(i) / STEPS) * (stops.length - 1);
    const at = Math.min(Math.floor(place), stops.length - 2);
    const part = place - at;
    out.push(stops[at].map((c, k) => Math.round(c + part * (stops[at + 1][k] - c))));
  }
  tables.set(name, out);
  return out;
}

// share in [−1, 1]; `curve`: "root" shows small values, "linear" does not.
export function colour(share, curve = "linear", name = theme()) {
  const bent = curve === "root" ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share;
  const clipped = Math.max(-1, Math.min(1, Number.isFinite(bent) ? bent : 0));
  return table(name)[Math.round(clipped * STEPS) + STEPS];
}

// A head of which the share 0 … 1 is doubtful. On dark paper the scale ends at its strongest orange: beyond, it pales.
export function doubt(share) {
  return colour(-share * (theme() === "dark" ? 0.62 : 0.92));
}

export function css([r, g, b]) {
  return `rgb(${r} ${g} ${b})`;
}

// Black or white, whichever can be read on it.
export function ink([r, g, b]) {
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff"; // the better of the two is never below 4.5 : 1
}

export const LINES = ["var(--line-1)", "var(--line-2)", "var(--line-3)", "var(--line-4)", "var(--line-5)", "var(--line-6)", "var(--line-7)", "var(--line-8)", "var(--line-9)", "var(--line-10)"];
export const DASHES = ["", "7 4", "2 4", "10 3 2 3", "1 3", "12 4"];
