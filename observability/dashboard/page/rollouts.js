// List of rollouts, and the view of one rollout token by token with each token's provenance.
// Model output is inserted only as text content, never as HTML.

import { key, short, versionColour } from "./charts.js";

const byId = (id) => document.getElementById(id);
const PAGE_SIZE = 200;

export class Rollouts {
  constructor() {
    this.skip = 0;
    this.page = null;
    for (const id of ["state-filter", "group-filter", "mixed-filter"]) {
      byId(id).onchange = () => this.list(0);
    }
    byId("refresh").onclick = () => this.list(this.skip);
    byId("earlier").onclick = () => this.list(Math.max(0, this.skip - PAGE_SIZE));
    byId("later").onclick = () => this.list(this.skip + PAGE_SIZE);
    byId("colour-by").onchange = () => this.draw();
    byId("rollout-more").onclick = () => this.open(this.page.rollout_id, this.page.end);
  }

  ofGroup(groupId) {
    byId("state-filter").value = "";
    byId("group-filter").value = String(groupId);
    byId("mixed-filter").checked = false;
    return this.list(0);
  }

  async list(skip) {
    const query = new URLSearchParams({ state: byId("state-filter").value,
      group: byId("group-filter").value, skip, mixed: byId("mixed-filter").checked ? 1 : 0 });
    const response = await fetch(`api/rollouts?${query}`);
    const body = await response.json();
    if (!response.ok) { byId("rollouts-note").textContent = body.error; return; }
    this.skip = skip;
    byId("rollouts-note").textContent =
      `${body.total ? skip + 1 : 0} to ${skip + body.rows.length} of ${body.total}`;
    byId("rollouts").tHead.replaceChildren(row("th", body.columns));
    byId("rollouts").tBodies[0].replaceChildren(...body.rows.map((values) => {
      const line = row("td", values.map((value) => (value === null ? "" : value)));
      line.onclick = () => this.open(values[0]);
      line.dataset.rollout = values[0];
      return line;
    }));
  }

  async open(rolloutId, start = 0) {
    const response = await fetch(`api/rollouts/${rolloutId}?start=${start}`);
    const body = await response.json();
    byId("rollout-section").hidden = false;
    if (!response.ok) {
      byId("rollout-title").textContent = body.error;
      byId("rollout-text").replaceChildren();
      return;
    }
    this.page = body;
    for (const line of byId("rollouts").tBodies[0].rows) {
      line.classList.toggle("chosen", line.dataset.rollout === String(rolloutId));
    }
    byId("rollout-title").textContent = `Rollout ${body.rollout_id}`;
    byId("rollout-more").hidden = body.end >= body.context_tokens;
    this.facts();
    this.draw();
    byId("rollout-section").scrollIntoView({ block: "nearest" });
  }

  facts() {
    const p = this.page;
    const facts = { group: `${p.group_id}, index ${p.index}`, state: `${p.state} ${p.reason}`,
      task: p.task, reward: short(p.reward), advantage: short(p.advantage),
      "consumed at": p.consumed_version === null ? "–" : `v${p.consumed_version}`,
      staleness: short(p.staleness), tokens: `${p.context_tokens}, shown ${p.start} to ${p.end}`,
      turns: p.turns.length };
    if (p.branch_of !== null) facts["branch of"] = `${p.branch_of}: ${p.fork_reason}`;
    byId("rollout-facts").replaceChildren(...Object.entries(facts).flatMap(([name, value]) =>
      [element("dt", name), element("dd", String(value))]));
  }

  draw() {
    const p = this.page;
    if (!p) return;
    const mode = byId("colour-by").value;
    const text = document.createDocumentFragment();
    const newest = p.consumed_version ?? Math.max(0, ...p.segments.map((s) => s[3]));
    let lastTurn = null;
    for (const [from, to, turn, version, engine, kv] of p.segments) {
      if (to <= p.start || from >= p.end) continue;
      if (turn !== lastTurn) text.append(heading(p, turn, from));
      lastTurn = turn;
      for (let at = Math.max(from, p.start); at < Math.min(to, p.end); at++) {
        const token = element("span", p.texts[at - p.start]);
        if (turn < 0) {
          token.className = "given";
        } else {
          const logprob = p.logprobs[at - p.start];
          token.className = "sampled";
          token.style.background = colour(mode, { version, logprob, lag: newest - version, kv });
          token.title = `token ${at}: v${version}, log-prob ${short(logprob)}, lag `
            + `${newest - version}, KV ${kv}, ${engine}`;
        }
        text.append(token);
      }
    }
    byId("rollout-text").replaceChildren(text);
    byId("colour-legend").replaceChildren(...legend(mode, p, newest));
  }
}

function heading(p, turn, from) {
  const text = turn < 0 ? (from === 0 ? "prompt" : "given") : describeTurn(p.turns[turn], turn);
  const line = element("span", text);
  line.className = "turn";
  return line;
}

function describeTurn(turn, number) {
  const versions = turn.versions.map(([version, tokens, engine]) =>
    `v${version} × ${tokens} on ${engine}`).join(", then ");
  const tools = turn.tools.length ? `, calls ${turn.tools.join(", ")}` : "";
  const reward = turn.reward === null ? "" : `, reward ${short(turn.reward)}`;
  return `turn ${number + 1}: ${versions}; ${turn.finish_reason ?? "running"}${tools}${reward}`;
}

function colour(mode, { version, logprob, lag, kv }) {
  if (mode === "version") return versionColour(version, 75);
  if (mode === "staleness") return `hsl(${Math.max(0, 130 - 32 * lag)} 65% 75%)`;
  if (mode === "kv") return kv === "fresh" ? "hsl(130 45% 78%)"
    : kv === "unknown" ? "hsl(0 0% 78%)" : "hsl(30 80% 72%)";
  return `hsl(${Math.max(0, 130 + 18 * (logprob ?? 0))} 65% 75%)`;
}

function legend(mode, p, newest) {
  if (mode === "version") {
    const versions = [...new Set(p.segments.map((s) => s[3]).filter((v) => v >= 0))];
    return versions.map((version) => key(versionColour(version, 75), `v${version}`));
  }
  if (mode === "staleness") {
    const lags = [...new Set(p.segments.filter((s) => s[3] >= 0).map((s) => newest - s[3]))];
    return lags.sort((a, b) => a - b).map((lag) => key(colour(mode, { lag }), `${lag} versions`));
  }
  if (mode === "kv") {
    return ["fresh", "mixed", "unknown"].map((kv) => key(colour(mode, { kv }), kv));
  }
  return [0, -1, -3, -7].map((logprob) => key(colour(mode, { logprob }), String(logprob)));
}

function row(kind, values) {
  const line = document.createElement("tr");
  line.append(...values.map((value) => element(kind, String(value))));
  return line;
}

export function element(kind, text) {
  const node = document.createElement(kind);
  node.textContent = text;
  return node;
}
