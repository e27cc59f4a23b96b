// The farm's page: it asks for the token, follows /v1/sight/changes with it, and draws what comes.
const TOKEN = "agentenv farm token";
const SILENT_MS = 10000;
const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const SAMPLES = 150;
const LEAST_SAMPLES = 30;
const KINDS = ["train", "eval", "interactive"];
const WHY = {
  queue: "others come first", cap: "the run has all it may have", paused: "the run is paused",
  no_capacity: "no container can be started", starting: "containers are starting", image: "its image is being fetched",
};
const FAULT_NAMES = {
  calls_timed_out: ["call timed out", "calls timed out"], calls_oom_killed: ["call out of memory", "calls out of memory"],
  calls_faulted: ["call with a fault", "calls with a fault"], leases_expired: ["lease expired", "leases expired"],
  slots_lost: ["slot died", "slots died"], start_failed: ["container did not start", "containers did not start"],
};

const containers = new Map();
let farm = null, runs = [], others = { runs: 0, held: 0, waiting: 0 }, queue = [], rates = [];
let clockAhead = 0;
let token = "";

// --- numbers in words ---------------------------------------------------------------------------

const now = () => performance.now() / 1000 + clockAhead;
const whole = (value) => Math.round(value).toLocaleString("en");
const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;
const perSecond = (value) => (value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

function duration(value) {
  if (value < 90) return `${Math.max(0, Math.round(value))} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 129600 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

// --- the token ----------------------------------------------------------------------------------

function tokenOfAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(TOKEN, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return given || sessionStorage.getItem(TOKEN) || "";
}

function askForToken(why) {
  sessionStorage.removeItem(TOKEN);
  byId("farm").hidden = true;
  byId("ask").hidden = false;
  if (why) byId("ask-why").textContent = why;
  say("no token", "down");
  ready();
}

let liveAt = null;

// What was drawn before the connection was lost is grey, and says of when it is.
function say(text, state) {
  if (state === "live") liveAt = new Date();
  const since = state === "down" && liveAt ? `; what is shown is of ${liveAt.toLocaleTimeString("en-GB")}` : "";
  byId("status").textContent = text + since;
  byId("status").dataset.state = state;
  byId("farm").classList.toggle("old", since !== "");
}

const ready = () => { document.documentElement.dataset.ready = "yes"; };

// --- lines from the farm ------------------------------------------------------------------------

const pause = (ms) => new Promise((done) => { setTimeout(done, ms); });

class Refused extends Error {}

async function* linesOf(path, controller) {
  let alarm = setTimeout(() => controller.abort(), SILENT_MS);
  try {
    const response = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", redirect: "manual", signal: controller.signal });
    if (response.type === "opaqueredirect") throw new Error("this service stands by");
    if (!response.ok) {
      const told = await response.json().catch(() => ({}));
      const why = [told.message, told.next_step].filter(Boolean).join("; ") || `HTTP ${response.status}`;
      throw response.status === 401 || response.status === 403 ? new Refused(why) : new Error(why);
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(alarm);
      alarm = setTimeout(() => controller.abort(), SILENT_MS);
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield JSON.parse(part);
    }
  } finally {
    clearTimeout(alarm);
    controller.abort();
  }
}

async function follow() {
  for (let failures = 0; ; failures += 1) {
    try {
      for await (const line of linesOf("v1/sight/changes", new AbortController())) {
        failures = 0;
        take(line);
        say("live", "live");
      }
      say("the farm has ended this connection; asking again", "down");
    } catch (error) {
      if (error instanceof Refused) return askForToken(error.message);
      say(`not connected (${error.name === "AbortError" ? "nothing came" : error.message}); asking again`, "down");
    }
    if (await goneToLeader()) return;
    await pause(RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]);
  }
}

// The service that leads may be another by now: it gets the page, and the token.
async function goneToLeader() {
  const health = await fetch("health", { cache: "no-store" }).then((response) => response.json()).catch(() => ({}));
  if (!health.leader_url) return false;
  say("another service leads; going there", "down");
  location.replace(`${health.leader_url}/#${new URLSearchParams({ token })}`);
  return true;
}

function take(line) {
  clockAhead = line.clock_s - performance.now() / 1000;
  if (line.type === "sight") {
    containers.clear();
    rates = [];
    map.laid = false;
  }
  for (const told of line.containers || []) takeContainer(told);
  for (const id of line.gone || []) {
    containers.delete(id);
    map.laid = false;
  }
  ({ farm = farm, runs = runs, others = others, queue = queue } = Object.fromEntries(Object.entries(line).filter(([, value]) => value !== null)));
  rates = rates.concat(line.rates || []).slice(-SAMPLES);
  drawSoon(Boolean(line.farm) || !map.laid);
}

function takeContainer(told) {
  const known = containers.get(told.id);
  if (!known) {
    containers.set(told.id, { ...told, slots: told.slots ? [...told.slots] : [] });
    map.laid = false;
    return;
  }
  if (known.state !== told.state) map.stale = true;
  known.state = told.state;
  for (const slot of told.slots || []) {
    if (!(slot.slot in known.slots)) map.laid = false;
    known.slots[slot.slot] = slot;
    map.changed(told.id, slot.slot);
  }
}

let drawing = 0, numbersDue = false;

function drawSoon(numbers) {
  numbersDue ||= numbers;
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    byId("ask").hidden = true;
    byId("farm").hidden = false;
    map.draw();
    if (numbersDue) {
      numbersDue = false;
      drawNumbers();
      drawRuns();
    }
    describeSlot();
    ready();
  });
}

// --- the chosen slot ----------------------------------------------------------------------------

const map = new SlotMap(byId("map"), byId("room"));

function chosen() {
  const cell = map.cell(), container = cell && containers.get(cell.container), slot = container && container.slots[cell.slot];
  return slot ? { container, slot } : null;
}

let described = "";

function describeSlot() {
  const found = chosen();
  byId("slot-tail").hidden = !found || !tailable(found.slot);
  if (!found) return;
  const { container, slot } = found;
  const holder = slot.run ? `${slot.run} · ${slot.trajectory}` : slot.state === "leased" ? "another run" : "";
  const kind = slot.run ? ` (${[slot.kind || "train", slot.environment].filter(Boolean).join(", ")})` : "";
  const place = `${container.id}/${slot.slot}${container.node ? ` on ${container.node}` : ""}${container.state === "ready" ? "" : ` (${container.state})`}`;
  const words = [place, `${slot.state} for ${duration(now() - slot.since_s)}`, visible(holder) + kind].filter(Boolean);
  const text = words.join(" · ");
  if (text === described) return;
  described = text;
  byId("slot-said").replaceChildren(element("b", {}, words[0]), text.slice(words[0].length));
}

const tailable = (slot) => slot.state === "leased" && Boolean(slot.run) && slot.epoch !== null && slot.epoch !== undefined;

// --- numbers ------------------------------------------------------------------------------------

const tiles = new Map();

function tile(key, big, name, small, ...lines) {
  if (!tiles.has(key)) {
    const made = element("li", { id: `tile-${key}` }, element("b"), element("span"), element("small"), drawn("svg", { viewBox: "0 0 150 30", preserveAspectRatio: "none", "aria-hidden": "true" }));
    byId("tiles").append(made);
    tiles.set(key, made);
  }
  const [value, what, about, graph] = tiles.get(key).children;
  value.textContent = big;
  what.textContent = name;
  about.textContent = small;
  graph.toggleAttribute("hidden", lines.length === 0);
  const top = Math.max(1e-9, ...lines.flatMap((line) => line.values).filter((one) => one !== null));
  graph.replaceChildren(...lines.map((line) => spark(line, top)));
}

function spark({ values, kind = "" }, top) {
  const step = 150 / (Math.max(LEAST_SAMPLES, values.length) - 1), start = 150 - step * (values.length - 1);
  let path = "", broken = true;
  values.forEach((value, index) => {
    if (value !== null) path += `${broken ? "M" : "L"}${(start + step * index).toFixed(2)} ${(29 - (27 * value) / top).toFixed(2)}`;
    broken = value === null;
  });
  return drawn("path", { class: `spark ${kind}`, d: path || "M0 0" });
}

function drawNumbers() {
  const slots = farm.load.slots, total = sum(slots), latest = rates[rates.length - 1] || {};
  byId("name").textContent = `Farm ${farm.farm}`;
  document.title = `${farm.farm} · ${whole(slots.leased || 0)}/${whole(total)} slots`;
  byId("about").textContent = `generation ${farm.generation}, agentenv ${farm.version}, isolation ${farm.isolation}`;
  byId("problem").textContent = farm.problem ? `Containers cannot be started: ${farm.problem}` : "";
  byId("problem").hidden = !farm.problem;
  const load = farm.load, ready = load.containers.ready || 0;
  tile("slots", whole(slots.leased || 0), `of ${plural(total, "slot")} leased`, `${whole(slots.free || 0)} free, up to ${whole(farm.max_slots)}`);
  const oldest = Math.max(0, ...queue.map((one) => one.oldest_wait_s));
  tile("waiting", whole(load.waiting), "asks waiting", queue.length ? `longest ${duration(oldest)}` : load.waiting ? "of other runs" : "nobody waits");
  const states = Object.entries(load.containers).filter(([state]) => state !== "ready").map(([state, count]) => `${count} ${state}`);
  tile("containers", whole(ready), `of ${plural(load.goal_containers, "container")} ready`, [...states, `at most ${whole(load.max_containers)}`].join(", "));
  const told = (value, text) => (value === null || value === undefined ? "–" : text(value));
  tile("calls", told(latest.calls_per_s, perSecond), "calls per second", `${whole(latest.calls_running || 0)} running`, { values: rates.map((one) => one.calls_per_s) });
  tile("times", told(latest.call_p50_s, seconds), "median time of a call", `1 in 100 over ${told(latest.call_p99_s, seconds)}`,
    { values: rates.map((one) => one.call_p50_s ?? null) }, { values: rates.map((one) => one.call_p99_s ?? null), kind: "second" });
  tile("leases", told(latest.leases_per_s, perSecond), "leases per second", "slots handed over", { values: rates.map((one) => one.leases_per_s) });
  drawFaults();
  drawLegend(slots);
}

function drawFaults() {
  const kinds = {};
  for (const one of rates) for (const [kind, count] of Object.entries(one.faults || {})) kinds[kind] = (kinds[kind] || 0) + count;
  const listed = Object.entries(kinds).sort((a, b) => b[1] - a[1]).map(([kind, count]) => `${whole(count)} ${FAULT_NAMES[kind]?.[count === 1 ? 0 : 1] || kind.replaceAll("_", " ")}`);
  tile("faults", whole(sum(kinds)), "faults in 5 minutes", listed.join(", ") || "none", { values: rates.map((one) => sum(one.faults || {})), kind: "bad" });
}

function drawLegend(slots) {
  const counts = { train: 0, eval: 0, interactive: 0, others: 0 };
  let late = 0;
  for (const container of containers.values()) {
    if (container.state !== "ready") late += 1;
    for (const slot of container.slots) if (slot && slot.state === "leased") counts[slot.run ? slot.kind || "train" : "others"] += 1;
  }
  const rows = [["free", slots.free || 0, "free"], ["train", counts.train, "leased, train"], ["eval", counts.eval, "eval"], ["interactive", counts.interactive, "interactive"],
    ["others", counts.others, "another run's"], ["resetting", slots.resetting || 0, "resetting"], ["quarantined", slots.quarantined || 0, "quarantined"]];
  const items = rows.filter(([key, count]) => count || key === "free" || key === "train").map(([key, count, name]) => element("li", {}, element("i", { class: `key ${key}` }), element("b", {}, whole(count)), ` ${name}`));
  if (late) items.push(element("li", {}, element("i", { class: "key late" }), element("b", {}, whole(late)), " containers late, starting or leaving"));
  byId("legend").replaceChildren(...items);
  const nodes = new Set([...containers.values()].map((one) => one.node));
  const about = `${plural(containers.size, "container")} on ${plural(nodes.size, "node")}`;
  byId("map-about").textContent = about;
  byId("map").setAttribute("aria-label", `Map of ${plural(sum(slots), "slot")}, ${about}: ${rows.map(([, count, name]) => `${count} ${name}`).join(", ")}`);
}

// --- runs ---------------------------------------------------------------------------------------

const rows = new Map();
const byName = new Intl.Collator("en", { numeric: true });

function rowOf(name) {
  if (!rows.has(name)) {
    const button = element("button", { class: "run-name", type: "button", "aria-pressed": "false", title: "Show only this run's slots on the map" }, visible(name));
    button.addEventListener("click", () => showOnly(name));
    const names = { share: "", waiting: "waits for", oldest: "longest", why: "", weight: "weight", guaranteed: "guaranteed", cap: "cap" };
    const cells = Object.fromEntries(Object.entries(names).map(([key, label]) => [key, element("td", label ? { class: key, "data-name": label } : { class: key })]));
    const bar = drawn("svg", { class: "held", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    cells.share.append(bar, element("small"));
    rows.set(name, { row: element("tr", {}, element("th", { scope: "row" }, button), ...Object.values(cells)), button, bar, cells });
  }
  return rows.get(name);
}

function drawRuns() {
  const top = Math.max(1, others.held, ...runs.map((run) => Math.max(sum(run.held), run.fair_share, run.share.guaranteed)));
  const shown = [...runs].sort((a, b) => byName.compare(a.run, b.run)).map((run) => drawRun(run, top));
  if (others.runs) shown.push(drawOthers(top));
  for (const [name, { row }] of rows) {
    if (shown.includes(row)) continue;
    row.remove();
    rows.delete(name);
  }
  const body = byId("run-rows");
  shown.forEach((row, index) => { if (body.children[index] !== row) body.insertBefore(row, body.children[index] || null); });
  byId("runs").hidden = shown.length === 0;
  byId("no-runs").hidden = shown.length > 0;
  byId("runs-about").textContent = shown.length ? `${plural(runs.length + others.runs, "run")}, ${plural(farm.load.waiting, "ask")} waiting` : "";
  if (map.run !== null && !runs.some((run) => run.run === map.run)) showOnly(map.run);
}

function drawRun(run, top) {
  const { row, bar, cells } = rowOf(run.run);
  const held = sum(run.held), share = run.share, waits = queue.filter((one) => one.run === run.run);
  let x = 0;
  const parts = KINDS.filter((kind) => run.held[kind]).map((kind) => {
    const width = (100 * run.held[kind]) / top;
    x += width;
    return drawn("rect", { class: kind, x: x - width, y: 0, width, height: 10 });
  });
  const mark = (kind, value) => drawn("line", { class: kind, x1: (100 * value) / top, x2: (100 * value) / top, y1: 0, y2: 10 });
  if (share.cap !== null && share.cap !== undefined && share.cap <= top) parts.push(mark("cap", share.cap));
  bar.replaceChildren(...parts, mark("fair", Math.min(run.fair_share, top)));
  const kinds = KINDS.filter((kind) => run.held[kind]).map((kind) => `${whole(run.held[kind])} ${kind}`);
  cells.share.lastChild.textContent = `${whole(held)} held${kinds.length > 1 ? ` (${kinds.join(", ")})` : ""}, fair share ${whole(run.fair_share)}`;
  cells.waiting.textContent = run.waiting ? whole(run.waiting) : "";
  cells.oldest.textContent = run.oldest_wait_s !== null && run.oldest_wait_s !== undefined ? duration(run.oldest_wait_s) : "";
  cells.why.textContent = !run.waiting ? "" : waits.map((one) => whyText(one, waits.length > 1)).join("; ");
  cells.weight.textContent = String(share.weight);
  cells.guaranteed.textContent = share.guaranteed ? whole(share.guaranteed) : "";
  cells.cap.textContent = share.paused ? "paused" : share.cap !== null && share.cap !== undefined ? whole(share.cap) : "";
  return row;
}

function drawOthers(top) {
  const { row, bar, button, cells } = rowOf("");
  button.disabled = true;
  button.textContent = plural(others.runs, "other run");
  bar.replaceChildren(drawn("rect", { class: "others", x: 0, y: 0, width: (100 * others.held) / top, height: 10 }));
  cells.share.lastChild.textContent = `${whole(others.held)} held`;
  cells.waiting.textContent = others.waiting ? whole(others.waiting) : "";
  return row;
}

function whyText(one, named) {
  const eta = one.eta_s !== null && one.eta_s !== undefined ? `, about ${duration(one.eta_s)} more` : "";
  return `${named ? `${one.kind}: ` : ""}${WHY[one.why] || one.why}${one.detail ? ` (${visible(one.detail)})` : ""}${eta}`;
}

function showOnly(name) {
  map.run = map.run === name ? null : name;
  for (const [run, { button }] of rows) button.setAttribute("aria-pressed", String(run === map.run));
  map.stale = true;
  map.draw();
}

// --- the output of one slot ---------------------------------------------------------------------

const MOST_SHOWN = 300000;
let tailing = null;

async function openTail() {
  const found = chosen();
  if (!found || !tailable(found.slot)) return;
  const { container, slot } = found;
  tailing?.abort();
  const controller = tailing = new AbortController();
  const log = new TailLog(byId("tail-text"));
  byId("tail-title").textContent = visible(slot.trajectory);
  byId("tail-about").textContent = `${visible(slot.run)} · slot ${container.id}/${slot.slot}, leased for ${duration(now() - slot.since_s)}`;
  byId("tail-status").textContent = "connecting";
  if (!byId("tail").open) byId("tail").showModal();
  const status = (text) => { if (controller === tailing) byId("tail-status").textContent = text; };
  try {
    const path = [container.id, slot.slot, slot.epoch].map(encodeURIComponent).join("/");
    for await (const line of linesOf(`v1/leases/${path}/tail`, controller)) {
      if (controller !== tailing) return;
      status(line.type === "over" ? "The lease has ended." : "live");
      log.add(line);
    }
  } catch (error) {
    if (controller === tailing) status(error.name === "AbortError" ? "Nothing came; open it again." : error.message);
  }
}

function closeTail() {
  tailing?.abort();
  tailing = null;
  byId("map").focus();
}

class TailLog {
  constructor(place) {
    this.place = place;
    this.length = 0;
    this.last = 0;
    this.begun = true;
    place.replaceChildren();
  }

  add(line) {
    const atEnd = this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight < 40;
    if (line.type === "call") this.put("command", `${line.tool === "bash" ? "$" : line.tool} ${visible(line.about || "")}\n`, line.call, true);
    if (line.type === "output") {
      if (line.skipped_bytes) this.put("end", `[… ${bytes(line.skipped_bytes)} not shown …]\n`, line.call, true);
      this.put(line.stream === "stderr" ? "err" : "out", visible(line.text), line.call);
    }
    if (line.type === "end") this.put(line.exit_code ? "end bad" : "end", `${this.outcome(line)}\n`, line.call, true);
    if (atEnd) this.place.scrollTop = this.place.scrollHeight;
  }

  outcome(line) {
    const code = line.exit_code === null || line.exit_code === undefined ? "" : `exit ${line.exit_code}`;
    const took = line.duration_s === null || line.duration_s === undefined ? "" : seconds(line.duration_s);
    return `[${[code, line.note && visible(line.note), took].filter(Boolean).join(", ")}]`;
  }

  // Calls of sessions run beside others: where the output of another goes on, its number is said.
  put(kind, text, call, ownLine = false) {
    const switched = this.last !== call && this.last !== 0 && kind !== "command" ? `(call ${call}) ` : "";
    const lead = (ownLine || switched) && !this.begun ? "\n" : "";
    this.place.append(element("span", { class: kind }, lead + switched + text));
    this.length += text.length;
    this.begun = text === "" ? this.begun : text.endsWith("\n");
    this.last = call;
    while (this.length > MOST_SHOWN && this.place.childNodes.length > 1) {
      this.length -= this.place.firstChild.textContent.length;
      this.place.firstChild.remove();
    }
  }
}

// --- hands --------------------------------------------------------------------------------------

const under = (event) => map.find(event.offsetX, event.offsetY);

byId("map").addEventListener("pointermove", (event) => { if (event.pointerType === "mouse" && under(event) >= 0) map.choose(under(event)); });
byId("map").addEventListener("click", (event) => {
  const index = under(event);
  if (index < 0) return;
  map.choose(index);
  if (event.pointerType !== "touch") openTail();
});
byId("map").addEventListener("keydown", (event) => {
  if (event.key.startsWith("Arrow")) map.choose(map.beside(event.key));
  else if (event.key === "Enter" || event.key === " ") openTail();
  else return;
  event.preventDefault();
});
byId("slot-tail").addEventListener("click", openTail);
byId("tail").addEventListener("close", closeTail);
byId("tail-close").addEventListener("click", () => byId("tail").close());
byId("theme").addEventListener("click", () => { switchTheme(); map.stale = true; map.draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { map.stale = true; map.draw(); });
new ResizeObserver(() => { if (farm && map.canvas.clientWidth !== map.room.clientWidth) { map.laid = false; drawSoon(false); } }).observe(byId("room"));
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(TOKEN, token);
  byId("token").value = "";
  byId("ask").hidden = true;
  follow();
});
window.addEventListener("hashchange", () => { if (location.hash.includes("token=")) location.reload(); });

token = tokenOfAddress();
if (token) follow();
else askForToken("");
