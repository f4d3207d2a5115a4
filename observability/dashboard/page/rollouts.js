// List of rollouts: sorted, searched, and addressed by a URL; and the choice of one of them.

import { byId, element, fetchJson } from "./dom.js";
import { short } from "./format.js";
import { RolloutPage } from "./rollout.js";

const PAGE_SIZE = 200;
const FILTERS = ["state", "group", "text", "task", "reason", "reward_min", "reward_max",
  "staleness_min", "staleness_max"];
const ALWAYS_SHOWN_FILTERS = ["state", "text", "task"];
const TITLES = { rollout_id: "rollout", group_id: "group", reason: "discarded because",
  fork_reason: "forked because", context_tokens: "tokens", oldest_version: "oldest v",
  newest_version: "newest v" };
const SHOWN_IF_KNOWN = ["reason", "fork_reason"];

export class Rollouts {
  constructor() {
    Object.assign(this, { query: new URLSearchParams(), listed: null, chosen: null,
      page: new RolloutPage() });
    byId("filters").onsubmit = (event) => { event.preventDefault(); this.search(); };
    byId("filters").onchange = () => this.search();
    byId("clear-filters").onclick = () => this.go(new URLSearchParams());
    byId("refresh").onclick = () => this.list();
    byId("earlier").onclick = () => this.turnPage(-PAGE_SIZE);
    byId("later").onclick = () => this.turnPage(PAGE_SIZE);
    byId("rollouts").onkeydown = (event) => this.moveInList(event);
  }

  /** Show the list that `query` selects, and the rollout with this id if there is one. */
  async show(query, id) {
    this.query = query;
    if (this.listed !== query.toString()) await this.list();
    this.chosen = id ?? null;
    document.body.classList.toggle("has-rollout", id !== undefined);
    byId("rollout-section").hidden = id === undefined;
    byId("rollout-close").href = this.addressOf(null);
    this.markChosen();
    if (id !== undefined) await this.page.open(id);
  }

  /** Return the address of a rollout in this list, or of the list alone. */
  addressOf(id, query = this.query) {
    const text = query.toString();
    return `#rollouts${id === null ? "" : `/${id}`}${text ? `?${text}` : ""}`;
  }

  go(query) {
    location.hash = this.addressOf(this.chosen, query);
  }

  /** Go to the list that the filters' fields select. */
  search() {
    const query = new URLSearchParams();
    for (const name of FILTERS) {
      const value = byId(`filter-${name}`).value.trim();
      if (value) query.set(name, value);
    }
    if (byId("filter-mixed").checked) query.set("mixed", "1");
    for (const name of ["sort", "descending"]) {
      if (this.query.get(name)) query.set(name, this.query.get(name));
    }
    this.go(query);
  }

  sortBy(column) {
    const query = new URLSearchParams(this.query), isSame = query.get("sort") === column;
    const wasDescending = query.get("descending") === "1";
    for (const name of ["sort", "descending", "skip"]) query.delete(name);
    if (!isSame || !wasDescending) query.set("sort", column);
    if (isSame && !wasDescending) query.set("descending", "1");
    this.go(query);
  }

  turnPage(by) {
    const query = new URLSearchParams(this.query), skip = Math.max(0, Number(query.get("skip") ?? 0) + by);
    query.delete("skip");
    if (skip) query.set("skip", String(skip));
    this.go(query);
  }

  fillFilters() {
    for (const name of FILTERS) byId(`filter-${name}`).value = this.query.get(name) ?? "";
    byId("filter-mixed").checked = this.query.get("mixed") === "1";
    const others = ["mixed", ...FILTERS].filter((name) => !ALWAYS_SHOWN_FILTERS.includes(name));
    if (others.some((name) => this.query.has(name))) byId("more-filters").open = true;
  }

  async list() {
    const query = this.query.toString();
    this.listed = query;
    this.fillFilters();
    byId("rollouts").setAttribute("aria-busy", "true");
    try {
      this.draw(await fetchJson(`api/rollouts?${query}`));
    } catch (error) {
      byId("rollouts-note").textContent = error.message;
    }
    byId("rollouts").removeAttribute("aria-busy");
  }

  draw({ columns, rows, total, note }) {
    const skip = Number(this.query.get("skip") ?? 0);
    byId("rollouts-note").textContent =
      `${rows.length ? skip + 1 : 0} to ${skip + rows.length} of ${total}${note ? `; ${note}` : ""}`;
    byId("earlier").disabled = skip === 0;
    byId("later").disabled = skip + rows.length >= total;
    byId("rollouts-empty").hidden = rows.length > 0;
    byId("rollouts-empty").textContent = this.query.size
      ? "No rollout matches. Change or clear the filters."
      : "No rollout yet. Rollouts appear when batches() is iterated and its tasks' episodes start.";
    const shown = columns.map((_, i) => i).filter((i) => !SHOWN_IF_KNOWN.includes(columns[i])
      || this.query.get("sort") === columns[i] || rows.some((values) => values[i]));
    const pick = (values) => shown.map((i) => values[i]);
    byId("rollouts").tHead.replaceChildren(this.header(pick(columns)));
    byId("rollouts").tBodies[0].replaceChildren(
      ...rows.map((values) => this.line(pick(columns), pick(values))));
    this.markChosen();
  }

  header(columns) {
    const line = document.createElement("tr");
    line.append(...columns.map((column) => {
      const cell = element("th"), button = element("button", TITLES[column] ?? column);
      const isSorted = this.query.get("sort") === column;
      const isDescending = this.query.get("descending") === "1";
      cell.scope = "col";
      if (isSorted) {
        cell.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
        button.append(element("span", isDescending ? " ▼" : " ▲"));
      }
      button.onclick = () => this.sortBy(column);
      cell.append(button);
      return cell;
    }));
    return line;
  }

  line(columns, values) {
    const line = document.createElement("tr"), [id] = values;
    line.dataset.rollout = id;
    line.append(...values.map((value, i) => {
      const text = value === null ? "" : typeof value === "number" ? short(value) : String(value);
      if (columns[i] === "group_id") {
        return element("td", value < 0 ? `evaluation ${-value}` : String(value));
      }
      if (i) return element("td", text);
      const cell = element("td"), link = element("a", String(id));
      link.href = this.addressOf(id);
      link.setAttribute("aria-label", `rollout ${id}`);
      cell.append(link);
      return cell;
    }));
    line.onclick = (event) => {
      if (event.target.tagName !== "A") location.hash = this.addressOf(id);
    };
    return line;
  }

  markChosen() {
    for (const line of byId("rollouts").tBodies[0].rows) {
      const isChosen = line.dataset.rollout === String(this.chosen);
      line.classList.toggle("chosen", isChosen);
      if (isChosen) line.setAttribute("aria-current", "true");
      else line.removeAttribute("aria-current");
      if (isChosen) line.scrollIntoView({ block: "nearest" });
      line.querySelector("a").href = this.addressOf(line.dataset.rollout);
    }
  }

  /** Move the focus up or down the list with the arrow keys. */
  moveInList(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = [...byId("rollouts").tBodies[0].querySelectorAll("a")];
    const next = links[links.indexOf(document.activeElement) + (step ?? NaN)];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }
}
