// Page of the dashboard: loads the run's state, follows its updates, and redraws each part.

import { bars, curve, parts, short, versionColour } from "./charts.js";
import { Rollouts, element } from "./rollouts.js";
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

function addFrame(frame) {
  last = frame;
  strips.add(frame.timeline);
  for (const batch of frame.batches) batches.set(batch.slice(0, 2).join(), batch);
  for (const key of batches.keys()) {
    if (batches.size <= BATCHES_KEPT) break;
    batches.delete(key);
  }
  // A hidden page draws nothing until it is shown again.
  if (!document.hidden && !byId("run-view").hidden) draw();
  document.body.dataset.frames = String(1 + Number(document.body.dataset.frames ?? 0));
}

const points = (name) => {
  const column = columns.indexOf(name);
  return [...batches.values()].map((batch) => [batch[0], batch[column]]);
};

function draw() {
  const { run, ledger, forecast } = last;
  strips.draw(last.at_us, last.is_over);
  tiles(run, ledger, forecast);
  setText("advice", forecast?.advice);
  warnings(run);
  curve(byId("reward"), points("reward"));
  curve(byId("ess"), points("effective_sample_size"), { from: 0, emptyText: "report it with report_off_policyness()" });
  bars(byId("staleness"), last.staleness, { limit: run.staleness_bound });
  bars(byId("lags"), last.lags, { colour: (lag) => `hsl(${Math.max(0, 130 - 32 * lag)} 55% 50%)` });
  const column = 1 + byLag.indexOf(byId("mismatch").value);
  bars(byId("kl"), last.off_policy.by_lag.map((row) => [row[0], row[column]]),
    { emptyText: isLive ? "report it with report_off_policyness(by_lag=)" : "not reported by the trainer" });
  byId("kl-note").textContent = last.off_policy.k3 === null ? ""
    : `all lags: k3 ${short(last.off_policy.k3)}, χ² ${short(last.off_policy.chi2)}`;
  const bias = last.length_bias;
  bars(byId("survival"), bias?.survival ?? []);
  byId("bias-note").textContent = bias ? `length bias ${short(bias.ratio)}` : "";
  byId("staleness-note").textContent = `mean ${short(run.mean_staleness)} (from generation `
    + `${short(run.mean_staleness_from_generation)}, from queue ${short(run.mean_staleness_from_queue)}), `
    + `highest ${run.max_staleness_seen}, bound ${run.staleness_bound ?? "none"}`;
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
    "running turns / slots": `${decoding} / ${slots}`, "queued turns": queued,
    "groups running": run.running_groups, "groups buffered": run.buffered_groups,
    "groups admissible": run.admissible_groups,
    "rollouts of 2+ versions": share(run.mixed_version_rollouts / Math.max(1, run.trained_rollouts)),
    "ρ, rollout/trainer speed": forecast ? short(forecast.throughput_ratio) : "–",
    "staleness predicted": forecast ? short(forecast.predicted_staleness) : "–",
    "mismatch KL": short(last.off_policy.kl),
    "group wait for last rollout": run.straggler_wait_groups ? seconds(run.mean_straggler_wait_s) : "–",
    "engine stall per swap": run.mean_weight_swap_stall_s ? seconds(run.mean_weight_swap_stall_s) : "–",
    ...Object.fromEntries(Object.entries(last.episode_activity_s).sort((a, b) => b[1] - a[1]).slice(0, 4)
      .map(([name, spent]) => [`episode time: ${name}`, seconds(spent)])),
    "prefill from cache": share(run.cached_context_tokens / Math.max(1, run.context_tokens)),
  };
  byId("tiles").replaceChildren(...Object.entries(shown).map(([name, value]) => {
    const tile = element("div", "");
    tile.className = "tile";
    tile.append(element("b", String(value)), element("span", name));
    return tile;
  }));
}

const seconds = (s) => (s < 1 ? `${short(1000 * s)} ms` : `${short(s)} s`);

function warnings(run) {
  const lines = [...last.stuck];
  if (run.publish_failure) lines.push(`a publish failed: ${run.publish_failure}`);
  if (run.pause_mode) lines.push(`engines are paused (mode ${run.pause_mode})`);
  if (run.batch_callback_errors) lines.push(`on_batch raised for ${run.batch_callback_errors} batches; see the log`);
  if (run.asleep.length) lines.push(`asleep: ${run.asleep.join(", ")}`);
  if (last.ledger.error) lines.push(`${last.ledger.error} tokens are unaccounted for`);
  byId("warnings").hidden = !lines.length;
  byId("warnings").replaceChildren(...lines.map((line) => element("li", line)));
}

function groups() {
  const cells = byId("groups"), running = last.groups.filter((group) => group[2]).length;
  byId("groups-note").textContent = `${running} running, ${last.groups.length - running} buffered; `
    + "colour: oldest version that a token may have; filled: share of ended rollouts";
  while (cells.children.length > last.groups.length) cells.lastChild.remove();
  last.groups.forEach(([id, size, active, oldest], i) => {
    const cell = cells.children[i] ?? cells.appendChild(element("button", ""));
    const drawn = `${id},${size},${active},${oldest}`;
    if (cell.dataset.drawn === drawn) return;
    cell.dataset.drawn = drawn;
    cell.title = `group ${id}: ${active} of ${size} rows running, v${oldest} or newer`;
    const done = Math.round((100 * (size - active)) / Math.max(1, size));
    const colour = versionColour(oldest);
    cell.style.background =
      `linear-gradient(to top, ${colour} ${done}%, color-mix(in srgb, ${colour} 28%, transparent) ${done}%)`;
    cell.onclick = () => { show("rollouts"); rollouts.ofGroup(id); };
  });
}

function tokens(ledger) {
  const discarded = Object.entries(ledger.discarded).sort().map(([reason, n], i) =>
    [`discarded: ${reason}`, n, `hsl(${(8 + 22 * i) % 60} 70% ${45 + 6 * (i % 4)}%)`]);
  parts(byId("ledger"), byId("ledger-legend"), [["trained", ledger.trained, "#2e9e5b"],
    ["buffered", ledger.buffered, "#4db6d6"], ["in flight", ledger.in_flight, "#8a7fd6"], ...discarded]);
  byId("ledger-note").textContent =
    `${short(ledger.generated)} generated, ${ledger.error} unaccounted for`;
}

function setText(id, text) {
  byId(id).hidden = !text;
  byId(id).textContent = text ?? "";
}

function state(text, kind) {
  byId("state").textContent = text;
  byId("state").className = `badge ${kind}`;
}

async function load() {
  const response = await fetch("api/state");
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  columns = body.batch_columns;
  byLag = body.by_lag_columns;
  isLive = body.about.is_live;
  document.title = `${body.about.name} – Tidegate`;
  byId("name").textContent = body.about.name;
  byId("model").textContent = body.about.model;
  byId("settings").replaceChildren(...Object.entries(body.about.settings).map(([name, value]) => {
    const line = document.createElement("tr");
    const text = typeof value === "string" ? value : JSON.stringify(value);
    line.append(element("th", name), element("td", text));
    return line;
  }));
  addFrame(body.frame);
  if (!isLive) state(body.about.is_whole ? "finished" : "killed or failed", body.about.is_whole ? "" : "bad");
}

function follow() {
  const updates = new EventSource("api/updates");
  updates.onopen = () => state("live", "live");
  updates.onmessage = (event) => addFrame(JSON.parse(event.data));
  updates.onerror = () => state("disconnected: the run has ended or is unreachable", "bad");
}

byId("mismatch").onchange = () => last && draw();
for (const view of VIEWS) byId(`show-${view}`).onclick = () => show(view);
window.addEventListener("resize", () => last && !byId("run-view").hidden && draw());
document.addEventListener("visibilitychange", () => !document.hidden && last && draw());
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname);
load().then(() => isLive && follow()).catch((error) => state(String(error.message), "bad"));
