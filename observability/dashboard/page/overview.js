// View of the run as a whole: figures, warnings, charts, groups and the token ledger.

import { bars, curves, parts } from "./charts.js";
import { theme, versionColour, versionTint } from "./colours.js";
import { byId, element, facts, setText } from "./dom.js";
import { percent, seconds, short } from "./format.js";

const BATCHES_KEPT = 2000, ACTIVITIES_SHOWN = 4;
const MISMATCH_TITLES = { k3: "KL (k3), nats", kl: "KL (k1), nats", chi2: "χ², no unit",
  ess: "effective sample size, share", ppl_ratio: "perplexity ratio, no unit" };

export class Overview {
  /** `openGroup(id)` shows a group's rollouts. */
  constructor(timeline, openGroup) {
    Object.assign(this, { timeline, openGroup, batches: new Map(), about: null, columns: [],
      byLag: [], frame: null, isEnded: false });
    byId("mismatch").onchange = () => this.frame && this.draw();
    byId("groups").onkeydown = (event) => this.moveInGroups(event);
  }

  /** Take what the server sends once: the run's settings and the names of columns. */
  begin(state) {
    this.about = state.about;
    this.columns = state.batch_columns;
    this.byLag = state.by_lag_columns;
    this.adapterColumns = state.adapter_columns ?? [];
    this.isEnded = !state.about.is_live;
    this.timeline.origin = this.isEnded ? "start" : "now";
    this.timeline.isResumed = this.about.resumed_batches?.length > 0;
  }

  add(frame) {
    this.frame = frame;
    this.timeline.add(frame.timeline, frame.at_us);
    for (const batch of frame.batches) this.batches.set(batch.slice(0, 2).join(), batch);
    for (const key of this.batches.keys()) {
      if (this.batches.size <= BATCHES_KEPT) break;
      this.batches.delete(key);
    }
  }

  /** Mark the run as over: what was going on is no longer shown. */
  end() {
    this.isEnded = true;
    this.timeline.origin = "end";
  }

  draw() {
    const { frame } = this;
    this.timeline.draw();
    this.drawFigures();
    setText("advice", frame.forecast ? `What limits this run: ${frame.forecast.advice}` : "");
    setText("scaling", frame.scaling ? `Engines scaled: ${frame.scaling}` : "");
    this.drawWarnings();
    this.drawAdapters();
    this.drawCurves();
    this.drawStaleness();
    this.drawMismatch();
    this.drawLengths();
    this.drawLost();
    this.drawGroups();
    this.drawLedger();
  }

  // ------------------------------------------------------------ figures

  drawFigures() {
    const groups = { Progress: this.progress(), Speed: this.speed(), "Off-policy": this.offPolicy() };
    if (!this.isEnded) groups.Now = this.now();
    byId("figures").replaceChildren(...Object.entries(groups).map(([title, pairs]) => {
      const block = element("section", "", "figures"), list = element("dl", "", "tiles");
      list.append(...pairs.map(([name, value]) => {
        const tile = element("div", "", "tile");
        tile.append(...facts([[name, value]]));
        return tile;
      }));
      block.append(element("h2", title), list);
      return block;
    }));
  }

  progress() {
    const { run, discards, forks } = this.frame;
    const discarded = discards.reduce((sum, [, rollouts]) => sum + rollouts, 0);
    return [["batches trained", run.batches], ["rollouts trained", short(run.trained_rollouts)],
      ["rollouts discarded", short(discarded)],
      ["rollouts forked", forks.rollouts ? percent(forks.forked / forks.rollouts) : "–"],
      ["newest version: trainer, live", `v${run.trainer_version}, v${run.live_version}`],
      ["time", seconds(run.wall_s)]];
  }

  speed() {
    const { run, episode_activity_s: spent } = this.frame;
    const activities = Object.entries(spent).sort(([, a], [, b]) => b - a).slice(0, ACTIVITIES_SHOWN);
    return [["tokens per second", short(run.tokens_per_s)], ["trainer idle", percent(run.trainer_idle_share)],
      ["engines idle", percent(run.engine_idle_share)],
      ["prefill from cache", percent(run.cached_context_tokens / Math.max(1, run.context_tokens))],
      ["group wait for last rollout", run.straggler_wait_groups ? seconds(run.mean_straggler_wait_s) : "–"],
      ["engine stall per swap", run.mean_weight_swap_stall_s ? seconds(run.mean_weight_swap_stall_s) : "–"],
      ...activities.map(([name, s]) => [`episodes in ${name}`, seconds(s)])];
  }

  offPolicy() {
    const { run, forecast, off_policy: measured } = this.frame;
    return [["mean staleness, versions", short(run.mean_staleness)],
      ["highest, and bound", `${run.max_staleness_seen} of ${run.staleness_bound ?? "no bound"}`],
      ["mean predicted", forecast ? short(forecast.predicted_staleness) : "–"],
      ["ρ, rollout/trainer speed", forecast ? short(forecast.throughput_ratio) : "–"],
      ["rollouts of 2+ versions", percent(run.mixed_version_rollouts / Math.max(1, run.trained_rollouts))],
      ["mismatch KL, nats", short(measured.kl)]];
  }

  now() {
    const { run, engines } = this.frame, sum = (column) =>
      engines.reduce((total, engine) => total + engine[column], 0);
    return [["running turns / slots", `${short(sum(2))} / ${short(sum(4))}`],
      ["queued turns", short(sum(3))],
      ["groups running", run.running_groups], ["groups buffered", run.buffered_groups],
      ["groups admissible", run.admissible_groups], ["engines", engines.filter((e) => e[7]).length]];
  }

  /** Show what needs attention; red only for tokens that were lost and a bound that was passed. */
  drawWarnings() {
    const { run, ledger, stuck, engines } = this.frame, broken = [], notes = [...stuck];
    if (ledger.error) broken.push(`${ledger.error} tokens are unaccounted for: a defect of Tidegate`);
    if (run.staleness_bound !== null && run.max_staleness_seen > run.staleness_bound) {
      broken.push(`staleness ${run.max_staleness_seen} was trained on, above the bound ${run.staleness_bound}`);
    }
    if (run.publish_failure) notes.push(`a publish failed: ${run.publish_failure}`);
    if (run.batch_callback_errors) {
      notes.push(`on_batch raised for ${run.batch_callback_errors} batches; see the log`);
    }
    if (!this.isEnded && run.pause_mode) notes.push(`engines are paused (mode ${run.pause_mode})`);
    const draining = engines.filter((engine) => engine[8] === "draining").map(([name]) => name);
    if (!this.isEnded && draining.length) notes.push(`about to leave: ${draining.join(", ")}`);
    if (!this.isEnded && run.asleep.length) notes.push(`asleep: ${run.asleep.join(", ")}`);
    byId("warnings").hidden = !broken.length && !notes.length;
    byId("warnings").replaceChildren(...broken.map((line) => element("li", line, "broken")),
      ...notes.map((line) => element("li", line)));
  }

  /** Draw a row per adapter that the run trains; red only for a bound that was passed. */
  drawAdapters() {
    const { adapters = [], adapters_total: total = 0 } = this.frame, table = byId("adapters");
    byId("adapters-section").hidden = !adapters.length;
    if (!adapters.length) return;
    byId("adapters-note").textContent = total > adapters.length
      ? `${adapters.length} of ${total}, by name` : "versions, staleness and tokens are each one's own";
    const titles = ["adapter", "version: trainer, live", "reward", "mean staleness", "highest, and bound",
      "groups running", "groups buffered", "batches", "rollouts of 2+ versions", "tokens in flight",
      "tokens trained", "tokens discarded"];
    const line = (kind, values) => {
      const row = document.createElement("tr");
      row.append(...values.map((value) => element(kind, value)));
      return row;
    };
    table.tHead.replaceChildren(line("th", titles));
    table.tBodies[0].replaceChildren(...adapters.map((values) => {
      const a = Object.fromEntries(this.adapterColumns.map((name, i) => [name, values[i]]));
      const row = line("td", [a.name, `v${a.trainer_version}, v${a.live_version}`, short(a.reward),
        short(a.mean_staleness), `${a.max_staleness} of ${a.staleness_bound ?? "no bound"}`,
        short(a.running_groups), short(a.buffered_groups), short(a.batches),
        percent(a.mixed_version_rollouts / Math.max(1, a.trained_rollouts)), short(a.in_flight_tokens),
        short(a.trained_tokens), short(a.discarded_tokens)]);
      const isPassed = a.staleness_bound !== null && a.max_staleness > a.staleness_bound;
      row.children[4].classList.toggle("broken", isPassed);
      return row;
    }));
  }

  // ------------------------------------------------------------ charts

  points(name) {
    const column = this.columns.indexOf(name);
    return [...this.batches.values()].map((batch) => [batch[0], batch[column]]);
  }

  /** Return the text of an empty chart: what fills it in a live run, or why it stays empty. */
  unless(live, ended) {
    return this.isEnded ? ended : live;
  }

  drawCurves() {
    const marks = (this.about.resumed_batches ?? []).map((batches) => [batches, "resumed"]);
    const rewards = [{ name: "batch", points: this.points("reward") }, ...this.evaluations()];
    curves(byId("reward"), rewards, { marks, names: true, yTitle: "mean reward",
      emptyText: this.unless("Filled by the first batch that the trainer takes from batches().",
        "The trainer took no batch, so there is no reward to show.") });
    curves(byId("ess"), [{ points: this.points("effective_sample_size") }], { from: 0, marks,
      yTitle: "effective sample size, share of the batch",
      emptyText: `${this.unless("Not reported yet.", "This run's trainer did not report it.")} Call `
        + "rollouts.report_off_policyness(effective_sample_size=…) after each batch." });
  }

  /** Return a curve for each name of evaluations: ink, with other dashes for each name. */
  evaluations() {
    const { evaluations } = this.frame, names = [...new Set(evaluations.map(([name]) => name))];
    return names.map((name, i) => ({ name, colour: theme().ink, dashes: [2 + 3 * i, 3], hasDots: true,
      points: evaluations.filter(([each]) => each === name).map(([, version, reward]) => [version, reward]) }));
  }

  drawStaleness() {
    const { run, staleness, lags } = this.frame;
    const emptyText = this.unless("Filled by the first batch that the trainer takes from batches().",
      "Nothing was trained on.");
    bars(byId("staleness"), staleness, { bound: run.staleness_bound, emptyText,
      xTitle: "staleness, versions", yTitle: "rollouts" });
    bars(byId("lags"), lags, { bound: run.staleness_bound, emptyText,
      xTitle: "lag, versions", yTitle: "tokens" });
    byId("staleness-note").textContent = `mean ${short(run.mean_staleness)}: `
      + `${short(run.mean_staleness_from_generation)} from generation, `
      + `${short(run.mean_staleness_from_queue)} from the queue`;
  }

  drawMismatch() {
    const measure = byId("mismatch").value, column = 1 + this.byLag.indexOf(measure);
    const { by_lag: rows, k3, chi2 } = this.frame.off_policy;
    bars(byId("kl"), rows.map((row) => [row[0], row[column]]), { xTitle: "lag, versions",
      yTitle: MISMATCH_TITLES[measure],
      emptyText: `${this.unless("Not reported yet.", "This run's trainer did not report it.")} Call `
        + "rollouts.report_off_policyness(by_lag=measure_mismatch_by_lag(…)) after each batch." });
    byId("kl-note").textContent = k3 === null ? "" : `all lags: k3 ${short(k3)}, χ² ${short(chi2)}`;
  }

  drawLengths() {
    const bias = this.frame.length_bias;
    bars(byId("survival"), (bias?.survival ?? []).map(([tokens, share]) => [tokens, 100 * share]),
      { high: 100, xTitle: "length of the rollout, up to tokens", yTitle: "share trained, %",
        emptyText: this.unless("Filled by the first batch that the trainer takes from batches().",
          "Nothing was trained on.") });
    byId("bias-note").textContent = bias
      ? `trained ${short(bias.trained)} tokens on average, generated ${short(bias.generated)}` : "";
  }

  // ------------------------------------------------------------ discards, groups and tokens

  /** Draw which rollouts were discarded, and how many forked, each by reason. */
  drawLost() {
    const { discards, forks } = this.frame;
    byId("forks-note").textContent = forks.forked
      ? `${forks.forked} of ${forks.rollouts} rollouts (${percent(forks.forked / forks.rollouts)}) `
        + "forked: a context did not continue what the model had read and written, or fork() was called."
      : "No rollout forked.";
    const rows = [...discards.map(([reason, rollouts, tokens]) => ["discarded", reason, rollouts, tokens]),
      ...forks.rows.map(([reason, branches]) => ["forked", reason, branches, null])];
    const table = byId("lost"), line = (kind, values) => {
      const row = document.createElement("tr");
      row.append(...values.map((value) =>
        element(kind, typeof value === "number" ? short(value) : value ?? "")));
      return row;
    };
    table.tHead.replaceChildren(line("th", ["", "reason", "rollouts", "tokens"]));
    table.tBodies[0].replaceChildren(...rows.map((row) => line("td", row)));
    table.hidden = !rows.length;
    if (!discards.length) byId("forks-note").textContent += " No rollout was discarded.";
  }


  drawGroups() {
    const shown = this.isEnded ? [] : this.frame.groups, cells = byId("groups");
    const running = shown.filter((group) => group[2]).length;
    byId("groups-note").textContent = shown.length ? `${running} running, ${shown.length - running} buffered; `
      + "colour: oldest version that a token may have; filled: share of ended rollouts" : "";
    setText("groups-empty", shown.length ? "" : this.unless(
      "No group runs or waits. A group starts when batches() is iterated and a task is admitted.",
      "The run is over: no group waits for the trainer."));
    while (cells.children.length > shown.length) cells.lastChild.remove();
    shown.forEach((group, i) => {
      this.drawGroup(cells.children[i] ?? cells.appendChild(element("button")), group);
    });
    if (cells.firstChild && !cells.querySelector("[tabindex='0']")) cells.firstChild.tabIndex = 0;
  }

  drawGroup(cell, [id, size, active, oldest]) {
    const drawn = `${id},${size},${active},${oldest}`;
    if (cell.dataset.drawn === drawn) return;
    if (!cell.dataset.drawn) cell.tabIndex = -1;
    cell.dataset.drawn = drawn;
    cell.title = `group ${id}: ${active} of ${size} rows running, v${oldest} or newer`;
    cell.setAttribute("aria-label", cell.title);
    const done = Math.round((100 * (size - active)) / Math.max(1, size));
    cell.style.background = `linear-gradient(to top, ${versionColour(oldest)} ${done}%, `
      + `${versionTint(oldest)} ${done}%)`;
    cell.onclick = () => this.openGroup(id);
  }

  /** Move the focus among groups with the arrow keys: only one of them is a tab stop. */
  moveInGroups(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], cells = [...byId("groups").children];
    const next = cells[cells.indexOf(document.activeElement) + (step ?? NaN)];
    if (!next) return;
    for (const cell of cells) cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  drawLedger() {
    const { ledger } = this.frame, colours = theme(), greys = [50, 62, 74, 56, 68];
    const discarded = Object.entries(ledger.discarded).sort().map(([reason, tokens], i) =>
      [`discarded: ${reason}`, tokens, `hsl(215 8% ${greys[i % greys.length]}%)`]);
    parts(byId("ledger"), byId("ledger-legend"), [["trained", ledger.trained, colours.accent],
      ["buffered", ledger.buffered, colours.paler], ["in flight", ledger.in_flight, colours.palest],
      ...discarded, ...(ledger.error ? [["unaccounted for", Math.abs(ledger.error), colours.bad]] : [])],
    { unit: "tokens" });
    byId("ledger-note").textContent =
      `${short(ledger.generated)} tokens generated, ${ledger.error} unaccounted for`;
  }
}
