// The server: its models, and its jobs with their progress.

import { Source } from "./data.js";

async function call(path, options) {
  const answer = await fetch(path, { headers: { "Content-Type": "application/json" }, ...options });
  if (!answer.ok) {
    let said = `${answer.status}`;
    try {
      const { detail } = await answer.json();
      said = typeof detail === "string" ? detail : detail?.[0]?.msg ?? said;
    } catch { /* the body was no JSON: the number has to do */ }
    throw new Error(said);
  }
  return answer;
}

// Wait for a job; `onprogress` hears every step. `cancel` on the promise stops it.
function follow(job, onprogress) {
  if (job.state === "done") return Promise.resolve(job.result);
  let stop;
  const promise = new Promise((resolve, reject) => {
    const events = new EventSource(`/api/jobs/${job.id}/events`);
    stop = () => { events.close(); reject(new Error("cancelled")); };
    events.addEventListener("progress", (event) => onprogress?.(JSON.parse(event.data)));
    events.addEventListener("end", (event) => {
      events.close();
      const ended = JSON.parse(event.data);
      if (ended.state === "done") resolve(ended.result);
      else reject(new Error(ended.error ?? (ended.state === "running" ? "the server stopped" : ended.state)));
    });
    events.onerror = () => { if (events.readyState === EventSource.CLOSED) reject(new Error("the server went away")); };
  });
  promise.cancel = () => { stop(); call(`/api/jobs/${job.id}`, { method: "DELETE" }).catch(() => {}); };
  return promise;
}

export class Live {
  static async connect() {
    const { models, methods, attributions, limits, runs, versions, pair } = await (await call("/api/models")).json();
    const live = new Live(models, methods, attributions, limits);
    live.runs = runs ?? [];
    live.versions = versions;
    live.pair = pair ?? "";
    return live;
  }

  constructor(models, methods, attributions, limits) {
    this.models = models;
    this.methods = methods;
    this.attributions = attributions;
    this.limits = limits;
    this.trace = null;
  }

  async open(request, onprogress) {
    this.running?.cancel?.();
    const job = await (await call("/api/traces", { method: "POST", body: JSON.stringify(request) })).json();
    const run = (this.running = follow(job, onprogress));
    const { trace } = await run;
    const manifest = await (await call(`/api/traces/${trace}`)).json();
    this.trace = trace;
    manifest.runs = [...(manifest.runs ?? []), ...this.runs];
    return new Source(manifest, async (key) => new Uint8Array(await (await call(`/api/traces/${trace}/blocks/${key}`)).arrayBuffer()), this);
  }

  cancel() {
    this.running?.cancel?.();
  }

  async ask(what, request, onprogress) {
    const job = await (await call(`/api/traces/${this.trace}/${what}`, { method: "POST", body: JSON.stringify(request) })).json();
    return follow(job, onprogress);
  }
}
