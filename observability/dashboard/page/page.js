// What of a run is shown where? Takes a state, then frames, and has each part drawn anew.

import { bars, curve, parts, short, versionColour } from "./charts.js";
import { Rollouts, made } from "./rollouts.js";
import { Strips } from "./strips.js";

const byId = (id) => document.getElementById(id);
const VIEWS = ["run", "rollouts", "settings"];
const BATCHES_KEPT = 2000;

const strips = new Strips(byId("timeline"), byId("timeline-legend"), byId("timeline-span"));
const rollouts = new Rollouts();
const batches = new Map();
let columns = [], byLag = [], last = null, isLive = false;

function show(view) {
  for (const each of VIEWS) {
    byId(`${each}-view`).hidden = each !== view;
    byId(`show-${each}`).classList.toggle("chosen", each === view);
  }
  if (view === "rollouts" && !byId("rollouts").tBodies[0].rows.length) rollouts.list(0);
  if (view === "run" && last) draw();
}

function take(frame) {
  last = frame;
  strips.add(frame.timeline);
  for (const batch of frame.batches) batches.set(batch.slice(0, 2).join(), batch);
  for (const one of batches.keys()) {
    if (batches.size <= BATCHES_KEPT) break;
    batches.delete(one);
  }
  // A page that nobody sees draws nothing; it is drawn when it is looked at again.
  if (!document.hidden && !byId("run-view").hidden) draw();
  document.body.dataset.frames = String(1 + Number(document.body.dataset.frames ?? 0));
}

const points = (name) => {
  const at = columns.indexOf(name);
  return [...batches.values()].map((batch) => [batch[0], batch[at]]);
};

function draw() {
  const { run, ledger, forecast } = last;
  strips.draw(last.at_us, last.is_over);
  tiles(run, ledger, forecast);
  said("advice", forecast?.advice);
  trouble(run);
  curve(byId("reward"), points("reward"));
  curve(byId("ess"), points("effective_sample_size"), { from: 0, why: "tell it by observe()" });
  bars(byId("staleness"), last.staleness, { limit: run.staleness_bound });
  bars(byId("lags"), last.lags, { colour: (lag) => `hsl(${Math.max(0, 130 - 32 * lag)} 55% 50%)` });
  const at = 1 + byLag.indexOf(byId("mismatch").value);
  bars(byId("kl"), last.off_policy.by_lag.map((told) => [told[0], told[at]]),
    { why: isLive ? "tell it by observe(by_lag=)" : "the trainer told none" });
  byId("kl-said").textContent = last.off_policy.k3 === null ? ""
    : `all: k3 ${short(last.off_policy.k3)}, χ² ${short(last.off_policy.chi2)}`;
  const bias = last.length_bias;
  bars(byId("survival"), bias?.survival ?? []);
  byId("bias-said").textContent = bias ? `length bias ${short(bias.ratio)}` : "";
  byId("staleness-said").textContent = `mean ${short(run.mean_staleness)}, highest `
    + `${run.max_staleness_seen}, bound ${run.staleness_bound ?? "none"}; of the mean `
    + `${short(run.mean_staleness_from_generation)} from generation, ${short(run.mean_staleness_from_queue)} from the queue`;
  groups();
  tokens(ledger);
}

function tiles(run, ledger, forecast) {
  const share = (value) => `${(100 * value).toFixed(1)} %`;
  const queued = last.engines.reduce((sum, engine) => sum + engine[3], 0);
  const decoding = last.engines.reduce((sum, engine) => sum + engine[2], 0);
  const slots = last.engines.reduce((sum, engine) => sum + engine[4], 0);
  const shown = {
    "trainer, live version": `v${run.trainer_version}, v${run.live_version}`,
    batches: run.batches, "rollouts trained": short(run.trained_rollouts),
    "tokens per second": short(run.tokens_per_s),
    "trainer idle": share(run.trainer_idle_share), "engines idle": share(run.engine_idle_share),
    "turns decoding of slots": `${decoding} / ${slots}`, "turns queued": queued,
    "groups running": run.running_groups, "groups buffered": run.buffered_groups,
    "may be admitted": run.admissible_groups,
    "over 2+ versions": share(run.mixed_version_rollouts / Math.max(1, run.trained_rollouts)),
    "ρ, rollout over trainer": forecast ? short(forecast.throughput_ratio) : "–",
    "staleness predicted": forecast ? short(forecast.predicted_staleness) : "–",
    "mismatch KL": short(last.off_policy.kl),
    "group's wait for its last": run.straggler_wait_groups ? seconds(run.mean_straggler_wait_s) : "–",
    "stall per weight swap": run.mean_weight_swap_stall_s ? seconds(run.mean_weight_swap_stall_s) : "–",
    ...Object.fromEntries(Object.entries(last.episode_activity_s).sort((a, b) => b[1] - a[1]).slice(0, 4)
      .map(([name, spent]) => [`episodes in ${name}`, seconds(spent)])),
    "context from cache": share(run.cached_context_tokens / Math.max(1, run.context_tokens)),
  };
  byId("tiles").replaceChildren(...Object.entries(shown).map(([name, value]) => {
    const tile = made("div", "");
    tile.className = "tile";
    tile.append(made("b", String(value)), made("span", name));
    return tile;
  }));
}

const seconds = (s) => (s < 1 ? `${short(1000 * s)} ms` : `${short(s)} s`);

function trouble(run) {
  const lines = [...last.stuck];
  if (run.publish_failure) lines.push(`a publish failed: ${run.publish_failure}`);
  if (run.pause_mode) lines.push(`engines are paused by ${run.pause_mode}`);
  if (run.batch_callback_errors) lines.push(`on_batch raised at ${run.batch_callback_errors} batches; see the log`);
  if (run.asleep.length) lines.push(`asleep: ${run.asleep.join(", ")}`);
  if (last.ledger.error) lines.push(`${last.ledger.error} tokens are unaccounted for`);
  byId("trouble").hidden = !lines.length;
  byId("trouble").replaceChildren(...lines.map((line) => made("li", line)));
}

function groups() {
  const cells = byId("groups"), running = last.groups.filter((group) => group[2]).length;
  byId("groups-said").textContent = `${running} running, ${last.groups.length - running} buffered; `
    + "the colour is the oldest version that its tokens may be of; those filled are buffered";
  while (cells.children.length > last.groups.length) cells.lastChild.remove();
  last.groups.forEach(([id, size, going, floor], i) => {
    const cell = cells.children[i] ?? cells.appendChild(made("button", ""));
    const look = `${id},${size},${going},${floor}`;
    if (cell.dataset.look === look) return;
    cell.dataset.look = look;
    cell.title = `group ${id}: ${going} of ${size} rows going on, v${floor} or newer`;
    const done = Math.round((100 * (size - going)) / Math.max(1, size));
    const colour = versionColour(floor);
    cell.style.background =
      `linear-gradient(to top, ${colour} ${done}%, color-mix(in srgb, ${colour} 28%, transparent) ${done}%)`;
    cell.onclick = () => { show("rollouts"); rollouts.ofGroup(id); };
  });
}

function tokens(ledger) {
  const gone = Object.entries(ledger.discarded).sort().map(([reason, n], i) =>
    [`discarded: ${reason}`, n, `hsl(${(8 + 22 * i) % 60} 70% ${45 + 6 * (i % 4)}%)`]);
  parts(byId("ledger"), byId("ledger-legend"), [["trained", ledger.trained, "#2e9e5b"],
    ["buffered", ledger.buffered, "#4db6d6"], ["in flight", ledger.in_flight, "#8a7fd6"], ...gone]);
  byId("ledger-said").textContent =
    `${short(ledger.generated)} generated, ${ledger.error} unaccounted for`;
}

function said(id, text) {
  byId(id).hidden = !text;
  byId(id).textContent = text ?? "";
}

function state(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `badge ${kind}`;
}

async function load() {
  const answer = await fetch("api/state");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  columns = body.batch_columns;
  byLag = body.by_lag_columns;
  isLive = body.about.is_live;
  document.title = `${body.about.name} – Tidegate`;
  byId("name").textContent = body.about.name;
  byId("model").textContent = body.about.model;
  byId("settings").replaceChildren(...Object.entries(body.about.settings).map(([name, value]) => {
    const line = document.createElement("tr");
    line.append(made("th", name), made("td", typeof value === "string" ? value : JSON.stringify(value)));
    return line;
  }));
  take(body.frame);
  if (!isLive) state(body.about.is_whole ? "finished" : "did not end", body.about.is_whole ? "" : "bad");
}

function follow() {
  const updates = new EventSource("api/updates");
  updates.onopen = () => state("live", "live");
  updates.onmessage = (event) => take(JSON.parse(event.data));
  updates.onerror = () => state("run has ended, or is out of reach", "bad");
}

byId("mismatch").onchange = () => last && draw();
for (const view of VIEWS) byId(`show-${view}`).onclick = () => show(view);
window.addEventListener("resize", () => last && !byId("run-view").hidden && draw());
document.addEventListener("visibilitychange", () => !document.hidden && last && draw());
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname);
load().then(() => isLive && follow()).catch((error) => state(String(error.message), "bad"));
