// The page's main program: connects its parts to the stream of snapshots.
import { wireKey } from "./api.js";
import { Diagram } from "./diagram.js";
import { EventLog } from "./event_log.js";
import { Feed } from "./feed.js";
import { HeatMap } from "./heat_map.js";
import { Playground } from "./playground.js";
import { Ratios } from "./ratios.js";
import { showHandoffs, showLatency, showPools, showQueues, showTenants, wireLatency } from "./tables.js";
import { Tiles } from "./tiles.js";
import { byId, say, set } from "./view.js";
import { WhatIf } from "./what_if.js";
import { Workers } from "./workers.js";

const tiles = new Tiles();
const workers = new Workers();
const heat = new HeatMap(workers);
const log = new EventLog();
const parts = [tiles, new Diagram(), workers, heat, new WhatIf(), new Ratios(), new Playground()];
const tables = [showPools, showHandoffs, showQueues, showLatency, showTenants];
let latest = null;
let isPaused = false;

const HEALTH = { ok: "healthy", degraded: "degraded", down: "down" };

function show(snapshot) {
  latest = snapshot;
  showHealth(snapshot);
  if (isPaused) return;
  say(byId("model"), snapshot.model);
  say(byId("traffic-note"), snapshot.rate_s ? `Rates: last ${Math.round(snapshot.rate_s)} s. Percentiles: last ${Math.round(snapshot.window_s)} s.` : "");
  for (const part of parts) part.show(snapshot);
  for (const table of tables) table(snapshot);
}

function showHealth({ health, reason }) {
  const badge = byId("health");
  const text = reason ? `${HEALTH[health] ?? health}: ${reason}` : (HEALTH[health] ?? health);
  if (badge.textContent === text) return;
  say(badge, text);
  set(badge, "data-health", health);
  announce(`The cluster is ${text}`);
}

/** Text for screen readers: rare changes only. */
function announce(text) {
  say(byId("announcer"), text);
}

function showState(state, text) {
  const connection = byId("connection");
  if (connection.dataset.state === state && byId("connection-text").textContent === text) return;
  const before = connection.dataset.state;
  connection.dataset.state = state;
  say(byId("connection-text"), state === "refused" ? "no access" : text);
  document.body.classList.toggle("stale", latest !== null && state !== "live");
  const notice = byId("notice");
  notice.hidden = state !== "waiting";
  if (state === "waiting") say(notice, "The router does not answer. These are its last figures; the console retries.");
  if (state !== before && (state === "waiting" || (state === "live" && before === "connecting" && latest !== null))) {
    announce(state === "live" ? "Connected again" : "The router does not answer");
  }
  if (state === "refused") askForKey(text);
}

wireLatency(() => latest && showLatency(latest));
workers.wire(() => {
  if (!latest) return;
  workers.show(latest);
  heat.draw();
});
const feed = new Feed({
  onHistory: (history) => {
    tiles.restore(history);
    heat.restore(history);
    log.clear();
  },
  onSnapshot: show,
  onLog: (events) => log.add(events),
  onState: showState,
});
const askForKey = wireKey(() => feed.start());

byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  set(event.currentTarget, "aria-pressed", isPaused);
  say(event.currentTarget, isPaused ? "Resume" : "Pause");
  // A new stream begins with what has happened meanwhile.
  if (!isPaused) feed.start();
});

feed.start();
