// Connection to the run: its state once, then an update per second until the run ends.

import { byId, element, fetchJson, setText } from "./dom.js";

const RETRY_MS = 4000;

export class Connection {
  /** `onState` gets the first state, `onFrame` each update, `onEnd` is called once at the end. */
  constructor({ onState, onFrame, onEnd }) {
    Object.assign(this, { onState, onFrame, onEnd, about: null });
  }

  async open() {
    let state;
    try {
      state = await fetchJson("api/state");
    } catch (error) {
      setStatus("no answer");
      setOutcome(`${error.message}. Reload the page to try again.`);
      return;
    }
    this.about = state.about;
    this.onState(state);
    if (this.about.is_live) this.follow();
    else this.showRecorded();
  }

  showRecorded() {
    if (this.about.is_whole) {
      setStatus("ended");
    } else {
      setStatus("killed or failed");
      setOutcome("The run's process was killed or failed before it could close its files. What it had "
        + "written until then is shown.");
    }
  }

  follow() {
    const updates = new EventSource("api/updates");
    updates.onopen = () => { setStatus("live", "live"); setOutcome(""); };
    updates.onmessage = (event) => this.onFrame(JSON.parse(event.data));
    updates.addEventListener("ended", (event) => {
      updates.close();
      this.end(JSON.parse(event.data));
    });
    updates.onerror = () => {
      setStatus("connection lost");
      setOutcome(`No answer since ${new Date().toLocaleTimeString()}: the run was killed, or its host is `
        + "unreachable. This is its last known state; the page keeps trying.");
    };
  }

  /** Show that the run is over, keep its last state, and offer its recorded view. */
  end({ frame, failure }) {
    this.onFrame(frame);
    this.onEnd();
    setStatus(failure ? "ended with an error" : "ended");
    const how = failure ? `The run ended with an error: ${failure}.` : "The run ended normally.";
    const { directory } = this.about;
    if (!directory) {
      setOutcome(`${how} This is its last state. It was not recorded: give serve() a run_directory to `
        + "keep the next one's rollouts.");
      return;
    }
    setOutcome(`${how} This is its last state. All its rollouts are shown by the command below; once it `
      + "runs, this page opens them.",
      `tidegate dashboard ${quote(directory)} --host ${location.hostname} --port ${location.port}`);
    this.awaitRecorded();
  }

  /** Reload once the recorded view of this run is served at this address. */
  awaitRecorded() {
    const timer = setInterval(async () => {
      if (document.hidden) return;
      const state = await fetchJson("api/state").catch(() => null);
      if (!state || state.about.is_live || state.about.name !== this.about.name) return;
      clearInterval(timer);
      location.reload();
    }, RETRY_MS);
  }
}

const quote = (path) => (/^[\w./~-]+$/.test(path) ? path : `'${path.replaceAll("'", "'\\''")}'`);

function setStatus(text, kind = "") {
  byId("state").textContent = text;
  byId("state").className = `badge ${kind}`;
}

/** Show a calm sentence about the run's end or the connection, and a command to copy. */
function setOutcome(text, command = "") {
  setText("outcome-text", text);
  byId("outcome").hidden = !text;
  byId("outcome-command").hidden = !command;
  if (!command) return;
  const copy = element("button", "copy");
  copy.onclick = () => navigator.clipboard.writeText(command).then(() => { copy.textContent = "copied"; });
  byId("outcome-command").replaceChildren(element("code", command), copy);
}
