// Runs side by side: which runs, the table of their figures, and their curves in one chart each.

import { curves, groupedBars } from "./charts.js";
import { runLook } from "./colours.js";
import { byId, element, fetchJson, key, setText } from "./dom.js";

export class Comparison {
  constructor() {
    Object.assign(this, { body: null, names: null, chosen: [] });
    byId("compare-runs").onchange = () => {
      const chosen = [...byId("compare-runs").querySelectorAll("input:checked")].map((box) => box.value);
      location.hash = `#compare?${new URLSearchParams(chosen.map((name) => ["run", name]))}`;
    };
  }

  /** Compare the runs that `query` names; without any, offer those that can be compared. */
  async show(query) {
    try {
      this.names ??= await fetchJson("api/runs");
      const asked = query.getAll("run");
      this.chosen = asked.length ? asked : this.names.slice(0, 1);
      this.drawChoice();
      await this.load();
    } catch (error) {
      this.body = null;
      setText("compare-note", error.message);
    }
    this.draw();
  }

  async load() {
    this.body = null;
    if (this.names.length < 2) {
      setText("compare-note", "There is no other run beside this one. Runs in the same directory can be "
        + "compared, and those named by: tidegate dashboard RUN OTHER_RUN");
    } else if (this.chosen.length < 2) {
      setText("compare-note", "Choose at least one other run.");
    } else {
      const query = new URLSearchParams(this.chosen.map((name) => ["run", name]));
      this.body = await fetchJson(`api/comparison?${query}`);
      setText("compare-note", "");
    }
  }

  drawChoice() {
    byId("compare-runs").replaceChildren(element("legend", "Runs"), ...this.names.map((name) => {
      const label = element("label"), box = element("input");
      Object.assign(box, { type: "checkbox", value: name, checked: this.chosen.includes(name) });
      label.append(box, ` ${name}`);
      return label;
    }));
  }

  draw() {
    byId("compare-body").hidden = !this.body;
    if (!this.body) return;
    const { body } = this, looks = body.runs.map((_, i) => runLook(i));
    const series = (points) => points.map((each, i) => ({ name: body.runs[i], points: each, ...looks[i] }));
    byId("compare-legend").replaceChildren(...body.runs.map((name, i) => key(looks[i].colour, name)));
    const reward = { yTitle: "mean reward of a batch", emptyText: "No run has recorded a reward." };
    curves(byId("compare-time"), series(body.reward_by_time),
      { ...reward, xTitle: "time, s", format: (s) => s });
    curves(byId("compare-version"), series(body.reward_by_version), reward);
    const heldOut = series(body.held_out_by_version).map((each) => ({ ...each, hasDots: true }));
    curves(byId("compare-held-out"), heldOut, { ...reward,
      yTitle: "mean reward on held-out tasks", emptyText: "No evaluation was recorded. "
        + "evaluate() before and after training, or every few versions, fills this chart." });
    groupedBars(byId("compare-staleness"), series(body.staleness.map((shares) =>
      shares.map(([age, share]) => [age, 100 * share]))),
    { xTitle: "staleness, versions", yTitle: "trained rollouts, %", emptyText: "Nothing was trained on." });
    groupedBars(byId("compare-idle"), series(body.idle.map(([trainer, engines]) =>
      [["trainer", 100 * trainer], ["engines", 100 * engines]])),
    { xTitle: "trainer and engines", yTitle: "idle, % of the run's time", emptyText: "" });
    this.drawTable();
  }

  drawTable() {
    const header = document.createElement("tr");
    header.append(element("th", "figure"), ...this.body.runs.map((name) => element("th", name)));
    for (const cell of header.children) cell.scope = "col";
    byId("compare-table").tHead.replaceChildren(header);
    byId("compare-table").tBodies[0].replaceChildren(...this.body.rows.map(([label, cells]) => {
      const line = document.createElement("tr"), head = element("th", label);
      head.scope = "row";
      line.append(head, ...cells.map((cell) => element("td", cell)));
      return line;
    }));
  }
}
