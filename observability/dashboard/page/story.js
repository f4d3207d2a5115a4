// Why: the story of a rollout, its group or its batch, as a list of events.

import { byId, element, fetchJson } from "./dom.js";

export class StoryPanel {
  constructor() {
    this.subject = null;
  }

  /** Offer the stories that belong to a rollout, and tell its own. */
  offer({ rollout_id: id, group_id: group, consumed_version: version }) {
    const subjects = [[`rollout:${id}`, `rollout ${id}`]];
    if (group >= 0) subjects.push([`group:${group}`, `group ${group}`]);
    if (version !== null) subjects.push([`batch:${version}`, `batch trained at v${version}`]);
    byId("story-subjects").replaceChildren(...subjects.map(([subject, name]) => {
      const button = element("button", name);
      button.dataset.subject = subject;
      button.onclick = () => this.tell(subject);
      return button;
    }));
    return this.tell(subjects[0][0]);
  }

  async tell(subject) {
    this.subject = subject;
    for (const button of byId("story-subjects").children) {
      button.setAttribute("aria-pressed", String(button.dataset.subject === subject));
    }
    let story;
    try {
      story = await fetchJson(`api/stories/${subject}`);
    } catch (error) {
      story = { events: [], note: error.message };
    }
    if (subject !== this.subject) return; // another one was chosen meanwhile
    byId("story").replaceChildren(...story.events.map(line));
    byId("story").classList.toggle("untimed", story.events.every((event) => event.at_s === null));
    byId("story-note").textContent = story.note;
  }
}

function line({ kind, text, at_s: atS }) {
  const item = element("li"), words = element("span", text, text.includes("ABOVE the bound") ? "broken" : "");
  item.append(element("span", atS === null ? "" : `${atS.toFixed(3)} s`, "at"),
    element("span", kind, "kind"), words);
  return item;
}
