// Composition of the page: which view is shown for which address, and who gets the run's updates.
//
//   #run   #rollouts?state=trained&text=…   #rollouts/41   #compare?run=sync&run=async   #settings

import { Comparison } from "./compare.js";
import { Connection } from "./connection.js";
import { byId, element, fetchJson } from "./dom.js";
import { Overview } from "./overview.js";
import { Rollouts } from "./rollouts.js";
import { Timeline } from "./timeline.js";

const VIEWS = ["run", "rollouts", "compare", "settings"];

const timeline = new Timeline(loadRange);
const overview = new Overview(timeline, (id) => { location.hash = `#rollouts?group=${id}`; });
const rollouts = new Rollouts();
const comparison = new Comparison();
const connection = new Connection({
  onState(state) {
    document.title = `${state.about.name} – Tidegate`;
    byId("name").textContent = state.about.name;
    byId("model").textContent = state.about.model.split("/").at(-1);
    byId("model").title = `model: ${state.about.model}`;
    drawSettings(state.about.settings);
    overview.begin(state);
    addFrame(state.frame);
    route();
  },
  onFrame: addFrame,
  onEnd() { overview.end(); redraw(); },
});

function addFrame(frame) {
  overview.add(frame);
  redraw();
  document.body.dataset.frames = String(1 + Number(document.body.dataset.frames ?? 0));
}

/** Draw the run's view; a hidden page draws nothing until it is shown again. */
function redraw() {
  if (document.hidden) return;
  if (overview.frame && !byId("run-view").hidden) overview.draw();
}

/** Return a finer timeline of a range; only recorded runs have one. */
async function loadRange(startUs, endUs) {
  if (!overview.about || overview.about.is_live) return null;
  const query = `start_us=${Math.floor(startUs)}&end_us=${Math.ceil(endUs)}`;
  return fetchJson(`api/timeline?${query}`).catch(() => null);
}

/** Show the view that the address names. */
function route() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const [first, id] = path.split("/"), view = VIEWS.includes(first) ? first : "run";
  for (const each of VIEWS) {
    byId(`${each}-view`).hidden = each !== view;
    if (each === view) byId(`show-${each}`).setAttribute("aria-current", "page");
    else byId(`show-${each}`).removeAttribute("aria-current");
  }
  document.body.classList.toggle("full-height", view === "rollouts");
  if (view === "rollouts") rollouts.show(new URLSearchParams(query), id);
  if (view === "compare") comparison.show(new URLSearchParams(query));
  redraw();
}

function drawSettings(settings) {
  byId("settings").tBodies[0].replaceChildren(...Object.entries(settings).map(([name, value]) => {
    const line = document.createElement("tr"), head = element("th", name);
    head.scope = "row";
    line.append(head, element("td", typeof value === "string" ? value : JSON.stringify(value)));
    return line;
  }));
}

window.addEventListener("hashchange", route);
for (const [target, event] of [[window, "resize"], [matchMedia("(prefers-color-scheme: dark)"), "change"]]) {
  target.addEventListener(event, () => { redraw(); if (!byId("compare-view").hidden) comparison.draw(); });
}
document.addEventListener("visibilitychange", redraw);
if (location.search.includes("token=")) history.replaceState(null, "", location.pathname + location.hash);
route();
connection.open();
