// The data behind the page: a manifest, and blocks of matrices that are decoded when they are looked at.

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function integers(about, bytes) {
  const count = about.shape.reduce((a, b) => a * b, 1);
  if (about.type.endsWith("8")) return about.type === "int8" ? new Int8Array(bytes.buffer, bytes.byteOffset, count) : bytes.subarray(0, count);
  const out = about.type === "int16" ? new Int16Array(count) : new Uint16Array(count);
  for (let i = 0; i < count; i++) out[i] = bytes[i] | (bytes[count + i] << 8);
  return out;
}

// value = scale · sign(q) · (|q| / levels)^power, worked out when asked.
export class Quantised {
  constructor(about, bytes) {
    this.shape = about.shape;
    this.scale = about.scale;
    this.levels = about.levels;
    this.power = about.power;
    this.q = integers(about, bytes);
  }

  value(q) {
    const share = Math.abs(q) / this.levels;
    return Math.sign(q) * this.scale * (this.power === 2 ? share * share : share);
  }

  at(row, column) {
    return this.value(this.q[row * this.shape[1] + column]);
  }

  row(row) {
    const out = new Float64Array(this.shape[1]);
    for (let j = 0; j < out.length; j++) out[j] = this.at(row, j);
    return out;
  }

  // All but `share` of the cells are at most this large.
  quantile(share) {
    const counts = new Uint32Array(this.levels + 1);
    for (const q of this.q) counts[Math.abs(q)]++;
    let left = share * this.q.length, level = this.levels;
    while (level > 1 && (left -= counts[level]) > 0) level--;
    return Math.abs(this.value(level));
  }

  get largest() {
    if (this._largest === undefined) {
      let most = 0;
      for (const q of this.q) if (q > most) most = q; else if (-q > most) most = -q;
      this._largest = Math.abs(this.value(most));
    }
    return this._largest;
  }
}

export async function decode(bytes) {
  const plain = await inflate(bytes);
  const length = new DataView(plain.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(plain.subarray(4, 4 + length)));
  let place = 4 + length;
  const arrays = {};
  for (const [name, about] of Object.entries(header.arrays)) {
    const size = about.shape.reduce((a, b) => a * b, 1) * (about.type.endsWith("16") ? 2 : 1);
    arrays[name] = new Quantised(about, plain.subarray(place, place + size));
    place += size;
  }
  return { ...header, arrays };
}

function fromBase64(text) {
  const plain = atob(text);
  const bytes = new Uint8Array(plain.length);
  for (let i = 0; i < plain.length; i++) bytes[i] = plain.charCodeAt(i);
  return bytes;
}

const KEEP = 24;

// A document: its manifest, and `block(key)`, which keeps the last few that were looked at.
export class Source {
  constructor(manifest, fetchBlock, live = null) {
    this.manifest = manifest;
    this.fetchBlock = fetchBlock;
    this.live = live;
    this.kept = new Map();
  }

  block(key) {
    const found = this.kept.get(key) ?? this.fetchBlock(key).then((bytes) => (bytes ? decode(bytes) : null));
    this.kept.delete(key);
    this.kept.set(key, found);
    found.catch(() => this.kept.delete(key));
    if (this.kept.size > KEEP) this.kept.delete(this.kept.keys().next().value);
    return found;
  }

  forget(key) {
    this.kept.delete(key);
  }
}

export function embedded() {
  const holder = document.getElementById("whence-manifest");
  if (!holder) return null;
  const blocks = new Map();
  for (const script of document.querySelectorAll("script[data-block]")) blocks.set(script.dataset.block, script);
  return new Source(JSON.parse(holder.textContent), async (key) => {
    const script = blocks.get(key);
    return script ? fromBase64(script.textContent) : null;
  });
}
