"use strict";
// Asks /api/overview every two seconds and shows it. Numbers that are metrics carry the metric's
// name in data-metric and its value in data-value.

const EVERY_MS = 2000;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const at = (id) => document.getElementById(id);
let before = null;
let beforeMs = 0;
let paused = false;
let timer = 0;

function bytes(value) {
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;

function duration(seconds) {
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 360000) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

function brief(seconds) {
  if (seconds < 0.001) return `${(1e6 * seconds).toFixed(0)} µs`;
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  return seconds < 100 ? `${seconds.toFixed(2)} s` : duration(seconds);
}

function element(kind, options = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function metric(name, labels, value, show) {
  // In the order of /metrics: by name.
  const inside = Object.entries(labels).sort().map(([key, text]) => `${key}="${text}"`).join(",");
  const full = inside ? `${name}{${inside}}` : name;
  return element("span", { "data-metric": full, "data-value": String(value) }, show(value));
}

function tile(name, ...content) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, ...content));
}

function showStatus(stats) {
  const daemon = stats.daemon;
  const clients = daemon.sessions.length;
  at("status").className = "";
  at("status").replaceChildren(
    `up ${duration(daemon.uptime_s)}, `, metric("kvdepot_clients", {}, clients, whole),
    clients === 1 ? " client" : " clients", paused ? ", paused" : "");
  at("version").textContent = `kvdepot ${daemon.version}`;
}

function showAlerts(alerts) {
  const lines = alerts.map((one) => element("li", { class: one.level },
    element("b", {}, one.level === "bad" ? "problem: " : one.level === "warn" ? "warning: " : "note: "),
    one.what, element("span", { class: "do" }, `What to do: ${one.do}`)));
  const fine = element("li", { class: "good" }, "Nothing is wrong.");
  const shown = lines.length ? lines : [fine];
  const text = shown.map((line) => line.textContent).join("\n");
  if (at("alerts").dataset.text !== text) {  // else a screen reader would say it again
    at("alerts").dataset.text = text;
    at("alerts").replaceChildren(...shown);
  }
}

function showTiles(stats, derived) {
  const assumed = stats.ledger.assumed;
  const tiles = [
    tile("hit ratio", derived.hit_ratio === null ? "no lookups"
      : metric("kvdepot_hit_ratio", {}, derived.hit_ratio, percent)),
    tile("tokens given back", element("span", { id: "tokens" }, whole(derived.tokens))),
    tile("blocks kept", metric("kvdepot_blocks", {}, stats.blocks, whole)),
    tile("blocks leased", metric("kvdepot_leased_blocks", {}, stats.leased, whole)),
    tile("blocks missed", metric("kvdepot_get_missed_blocks_total", {}, stats.counters.get_miss, whole)),
    tile("corrupt, never served",
      metric("kvdepot_corrupt_blocks_total", {}, stats.counters.quarantined, whole)),
  ];
  if (derived.gpu_seconds !== null) {
    tiles.splice(2, 0, tile("GPU time saved",
      metric("kvdepot_gpu_saved_seconds_total", {}, derived.gpu_seconds, duration)));
  }
  at("tiles").replaceChildren(...tiles);
  at("assumption").textContent = derived.gpu_seconds === null
    ? "Set ledger.prefill_tokens_per_s to see the GPU time saved."
    : "GPU time: tokens given back, by " + (assumed.prefill_tokens_per_s
      ? `measured prefill, else ${whole(assumed.prefill_tokens_per_s)} tokens a second` : "the prefill speed that engines measure")
      + (derived.joules === null ? "." : `; ${whole(derived.joules / 3600)} Wh at ${whole(assumed.gpu_watts)} W.`);
}

function showFirstTokens(told) {
  const count = told.compared;
  const mean = (value) => brief(value / count);
  const tiles = count ? [
    tile("with kvdepot, measured",
      metric("kvdepot_first_token_measured_seconds_total", {}, told.seconds, mean)),
    tile("without, as predicted",
      metric("kvdepot_first_token_recompute_seconds_total", {}, told.recompute_seconds, mean)),
    tile("with, as predicted",
      metric("kvdepot_first_token_predicted_seconds_total", {}, told.predicted_seconds, mean)),
    tile("prompts", metric("kvdepot_first_tokens_compared_total", {}, count, whole)),
  ] : [];
  at("first").hidden = !count;
  at("first").replaceChildren(...tiles);
  at("first-words").textContent = count
    ? "Means over prompts of which the depot had something. Without: computing the whole prompt, at the engine's own measured speed."
    : "No engine has told of any. vLLM does, once it has learnt its own speed.";
}

function showLog(latest) {
  const time = (value) => element("td", { class: "number" }, value === null ? "–" : brief(value));
  const rows = latest.map((one) => element("tr", {},
    element("th", { scope: "row" }, `${duration(one.ago_s)} ago`),
    element("td", {}, one.decision.replace("_", " ")),
    element("td", { class: "number" }, whole(one.prompt_tokens)),
    element("td", { class: "number" }, whole(one.fetched_tokens)),
    time(one.predicted_s), time(one.seconds), time(one.recompute_s), element("td", {}, one.why)));
  at("log").replaceChildren(...rows);
  at("log-table").hidden = !rows.length;
  at("log-empty").textContent = rows.length
    ? "Tokens, and times to the first one; computed: predicted for computing the whole prompt."
    : "No engine has told of any.";
}

function flowOf(name, stats, seconds) {
  if (before === null || seconds <= 0 || stats.daemon.uptime_s < before.daemon.uptime_s) return null;
  const given = (one) => one.traffic.served_bytes[name] || 0;
  return Math.max(0, given(stats) - given(before)) / seconds;
}

function showLadder(stats, seconds) {
  const rows = Object.entries(stats.tiers).map(([name, tier]) => {
    const labels = { tier: name };
    const share = tier.capacity_bytes ? tier.used_bytes / tier.capacity_bytes : 0;
    const fill = element("div", { class: `fill ${name}` });
    fill.style.width = `${Math.min(100, 100 * share)}%`;
    const bar = element("div", {
      class: "bar", role: "meter", "aria-label": `${name} fill`, "aria-valuemin": "0",
      "aria-valuemax": "100", "aria-valuenow": String(Math.round(100 * share)),
      "aria-valuetext": `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`,
    }, fill);
    const flow = flowOf(name, stats, seconds);
    const facts = [
      metric("kvdepot_tier_used_bytes", labels, tier.used_bytes, bytes), " of ",
      metric("kvdepot_tier_capacity_bytes", labels, tier.capacity_bytes, bytes), ", ",
      metric("kvdepot_tier_blocks", labels, tier.blocks, whole), " blocks, gave ",
      metric("kvdepot_get_blocks_total", labels, stats.counters[`get_${name}`] || 0, whole), " (",
      metric("kvdepot_get_bytes_total", labels, stats.traffic.served_bytes[name] || 0, bytes), ", ",
      metric("kvdepot_get_tokens_total", labels, stats.ledger.tiers[name] || 0, whole),
      " tokens)",
    ];
    if (tier.write_queue) {
      facts.push("; ", metric("kvdepot_write_queue_bytes", labels, tier.write_queue.bytes, bytes),
        " wait to be written");
    }
    return element("li", {}, element("span", { class: "name" }, name), bar,
      element("span", { class: "flow" }, flow === null ? "–" : `gives ${bytes(flow)}/s`),
      element("span", { class: "facts" }, ...facts));
  });
  at("ladder").replaceChildren(...rows);
}

function healthOf(drive) {
  if (drive.drained) return ["drained", ""];
  if (drive.draining) return ["being drained", ""];
  return drive.healthy ? ["ok", "good"] : [`down: ${drive.reason}`, "bad"];
}

function showDrives(stats) {
  const rows = [];
  for (const [tier, facts] of Object.entries(stats.tiers)) {
    for (const drive of facts.drives || []) {
      const labels = { tier, drive: drive.path };
      const [health, style] = healthOf(drive);
      const written = drive.written || {};
      const wear = written.daily_bytes
        ? `${bytes(written.level_bytes)} left now, ${bytes(written.daily_bytes)} a day` : "no limit set";
      rows.push(element("tr", {}, element("th", { scope: "row" }, drive.path), element("td", {}, tier),
        element("td", { class: style }, health),
        element("td", { class: "number" }, metric("kvdepot_drive_used_bytes", labels, drive.used_bytes, bytes)),
        element("td", { class: "number" },
          metric("kvdepot_drive_capacity_bytes", labels, drive.capacity_bytes, bytes)),
        element("td", { class: "number" }, drive.read_bytes_per_s ? `${bytes(drive.read_bytes_per_s)}/s` : "–"),
        element("td", { class: "number" },
          metric("kvdepot_drive_written_bytes_total", labels, written.bytes || 0, bytes)),
        element("td", {}, wear)));
    }
  }
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: "8" }, "memory only")));
  at("drives").replaceChildren(...rows);
}

function showSessions(found) {
  at("names").textContent = found.names_hidden && found.stats.sessions.remembered
    ? "Names are hidden: start with --http-token-file to see them." : "";
  const rows = [];
  for (const [kind, listed] of [["busiest", found.sessions.busy], ["coldest", found.sessions.cold]]) {
    for (const one of listed) {
      const where = Object.entries(one.tiers).map(([tier, count]) => `${tier} ${count}`).join(", ");
      rows.push(element("tr", {}, element("th", { scope: "row" }, one.name), element("td", {}, kind),
        element("td", {}, one.state), element("td", { class: "number" }, whole(one.turns)),
        element("td", { class: "number" }, whole(one.blocks)),
        element("td", { class: "number" }, bytes(Math.max(0, ...Object.values(one.bytes)))),
        element("td", {}, where || "gone"),
        element("td", { class: "number" }, duration(one.idle_s)),
        element("td", {}, one.pin ? new Date(1000 * one.pin.until_s).toLocaleString() : "–")));
    }
  }
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: "9" }, "none told of")));
  at("sessions").replaceChildren(...rows);
}

function showDecisions(stats) {
  const counters = stats.counters;
  const moved = (name) => (value) => metric("kvdepot_moved_blocks_total", { move: name }, value, whole);
  const lines = [
    [moved("promote")(counters.promoted), " blocks were promoted to a faster tier"],
    [moved("demote")(counters.demoted), " were demoted to a slower one"],
    [moved("prefetch")(counters.hinted), " came to memory because of a hint"],
    [metric("kvdepot_admission_refused_blocks_total", { reason: "wear" }, counters.bypassed, whole),
      " were not worth the wear of an SSD"],
    [metric("kvdepot_admission_refused_blocks_total", { reason: "thrashing" }, counters.held_below, whole),
      " were not promoted because the tier thrashes"],
    [metric("kvdepot_put_blocks_total", { outcome: "throttled" }, counters.put_throttled, whole),
      " were refused because too much waits to be written"],
  ];
  at("decisions").replaceChildren(...lines.map((parts) => element("li", {}, ...parts)));
}

function showEvents(events) {
  const lines = events.slice(0, 20).map((one) => element("li", { class: one.level },
    element("time", {}, `${duration(one.ago_s)} ago`), ` ${one.what}`));
  at("events").replaceChildren(...(lines.length ? lines : [element("li", {}, "nothing yet")]));
}

function show(found) {
  const stats = found.stats;
  const nowMs = performance.now();
  showStatus(stats);
  showAlerts(found.alerts);
  showTiles(stats, found.derived);
  showLadder(stats, (nowMs - beforeMs) / 1000);
  showDrives(stats);
  showSessions(found);
  showDecisions(stats);
  showFirstTokens(stats.first_tokens);
  showLog(stats.first_tokens.latest);
  showEvents(found.events);
  before = stats;
  beforeMs = nowMs;
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}

function fail(text) {
  at("status").className = "bad";
  at("status").textContent = text;
}

async function look() {
  clearTimeout(timer);
  try {
    const token = sessionStorage.getItem("token");
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    const answer = await fetch("/api/overview", { headers });
    if (answer.status === 401) {
      at("token-form").hidden = false;
      fail(token ? "the token is wrong" : "a token is needed");
      return;
    }
    if (!answer.ok) throw new Error(`answered ${answer.status}`);
    at("token-form").hidden = true;
    show(await answer.json());
  } catch (error) {
    fail(`no answer from the daemon: ${error.message}`);
  }
  if (!paused) timer = setTimeout(look, EVERY_MS);
}

at("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", at("token").value.trim());
  at("token").value = "";
  look();
});
at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) clearTimeout(timer);
  else look();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else if (!paused) look();
});
look();
