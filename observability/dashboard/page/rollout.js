// View of one rollout: its facts, and its text token by token with each token's provenance.

import { lagColour, shade, versionColour, versionTint } from "./colours.js";
import { byId, element, facts, fetchJson, key } from "./dom.js";
import { short } from "./format.js";
import { StoryPanel } from "./story.js";

const LOGPROB_SHADES_FROM = -7;
const EMPTIED_BY_ERRORS = ["rollout-facts", "rollout-text", "colour-legend", "story-subjects", "story"];

export class RolloutPage {
  constructor() {
    Object.assign(this, { page: null, story: new StoryPanel() });
    byId("colour-by").onchange = () => this.draw();
    byId("rollout-more").onclick = () => this.open(this.page.rollout_id, this.page.end);
  }

  async open(rolloutId, start = 0) {
    try {
      this.page = await fetchJson(`api/rollouts/${rolloutId}?start=${start}`);
    } catch (error) {
      this.page = null;
      byId("rollout-title").textContent = error.message;
      for (const id of EMPTIED_BY_ERRORS) byId(id).replaceChildren();
      return;
    }
    byId("rollout-title").textContent = `Rollout ${this.page.rollout_id}`;
    byId("rollout-more").hidden = this.page.end >= this.page.context_tokens;
    this.drawFacts();
    this.draw();
    byId("rollout-section").scrollTop = 0;
    await this.story.offer(this.page);
  }

  drawFacts() {
    const p = this.page, isPassed = p.bound !== null && p.staleness > p.bound;
    const pairs = [["group", `${p.group_id}, index ${p.index}`], ["state", `${p.state} ${p.reason}`],
      ["task", p.task], ["reward", short(p.reward)], ["advantage", short(p.advantage)],
      ["consumed at", p.consumed_version === null ? "not consumed" : `v${p.consumed_version}`],
      ["staleness", p.staleness === null ? "–" : `${p.staleness} versions`
        + (p.bound === null ? "" : isPassed ? `, above the bound ${p.bound}` : `, bound ${p.bound}`)],
      ["tokens", `${p.context_tokens}, shown ${p.start} to ${p.end}`], ["turns", p.turns.length]];
    if (p.branch_of !== null) pairs.push(["branch of", `${p.branch_of}: ${p.fork_reason}`]);
    byId("rollout-facts").replaceChildren(...facts(pairs));
  }

  draw() {
    const p = this.page;
    if (!p) return;
    const colouring = COLOURINGS[byId("colour-by").value](p);
    const text = document.createDocumentFragment();
    let lastTurn = null;
    for (const [from, to, turn, version, engine, kv] of p.segments) {
      if (to <= p.start || from >= p.end) continue;
      if (turn !== lastTurn) text.append(heading(p, turn, from));
      lastTurn = turn;
      for (let at = Math.max(from, p.start); at < Math.min(to, p.end); at++) {
        const token = element("span", p.texts[at - p.start], turn < 0 ? "given" : "sampled");
        if (turn >= 0) {
          const logprob = p.logprobs[at - p.start], lag = consumedAt(p) - version;
          const [colour, look = ""] = colouring.of({ version, logprob, lag, kv });
          token.style.background = colour;
          if (look) token.classList.add(look);
          token.title = `token ${at}: v${version}, log-prob ${short(logprob)}, lag ${lag}, KV ${kv}, ${engine}`;
        }
        text.append(token);
      }
    }
    byId("rollout-text").replaceChildren(text);
    byId("colour-legend").replaceChildren(...colouring.legend.map(([look, name]) => key(look, name)));
  }
}

/** Return the version that lags are counted to: the trainer's, or else the newest that sampled. */
const consumedAt = (p) => p.consumed_version ?? Math.max(0, ...p.segments.map((s) => s[3]));

const sampled = (p) => p.segments.filter((segment) => segment[3] >= 0);
const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
const likelihood = (logprob) => shade((logprob ?? 0) / LOGPROB_SHADES_FROM);

/** Ways to colour tokens: `of` returns [colour, class], `legend` is [[colour or class, text], …]. */
const COLOURINGS = {
  version: (p) => ({
    of: ({ version }) => [versionTint(version)],
    legend: ascending(sampled(p).map((s) => s[3])).map((v) => [versionTint(v), `v${v}`]),
  }),
  logprob: () => ({
    of: ({ logprob }) => [likelihood(logprob)],
    legend: [0, -1, -3, -7].map((logprob) => [likelihood(logprob), `log-prob ${logprob}`]),
  }),
  staleness: (p) => ({
    of: ({ lag }) => [lagColour(lag, p.bound)],
    legend: ascending(sampled(p).map((s) => consumedAt(p) - s[3])).map((lag) =>
      [lagColour(lag, p.bound), `lag ${lag}${p.bound !== null && lag > p.bound ? ", above the bound" : ""}`]),
  }),
  kv: () => ({
    of: ({ kv }) => (kv === "fresh" ? [shade(0)] : kv === "unknown" ? ["#d5dade", "kv-unknown"]
      : [shade(0.7), "kv-mixed"]),
    legend: [[shade(0), "KV of the token's own version"], [shade(0.7), "KV of older versions too (mixed)"],
      ["#d5dade", "KV's versions unknown"]],
  }),
};

function heading(p, turn, from) {
  const line = element("span", "", "turn");
  if (turn < 0) line.textContent = from === 0 ? "prompt" : "given";
  else describeTurn(line, p.turns[turn], turn);
  return line;
}

function describeTurn(line, turn, number) {
  const tools = turn.tools.length ? `, calls ${turn.tools.join(", ")}` : "";
  const reward = turn.reward === null ? "" : `, reward ${short(turn.reward)}`;
  line.append(`turn ${number + 1}: `);
  turn.versions.forEach(([version, tokens, engine], i) => line.append(i ? ", then " : "",
    key(versionColour(version), `v${version} × ${tokens} tokens on ${engine}`)));
  line.append(`; ${turn.finish_reason ?? "running"}${tools}${reward}`);
}
