// Many runs: which are shown decides what the curves, the errors and the tasks are of.
const MOST_SHOWN_FIRST = 8;
const COLOURS = 8;
const RUN_STATES = { running: "", finished: "", failed: "bad", interrupted: "warn", killed: "bad" };

const { inside: INSIDE, success: SUCCESS, runs: RUNS, items: ITEMS, pairs: PAIRS, errors: ERRORS } = parsed("data-overview");
const LETTERS = RUNS.map((_, index) => (index < 26 ? String.fromCharCode(65 + index) : `R${index + 1}`));
const shownRuns = new Set(RUNS.map((_, index) => index).slice(-MOST_SHOWN_FIRST));

const shown = () => RUNS.map((_, index) => index).filter((index) => shownRuns.has(index));
const runColour = (index) => `run-${index % COLOURS}`;
const figure = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const whole = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en"));
const compact = (value) => (value === null || value === undefined ? "–" : Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value));
const range = (interval, digits = 2) => (interval ? `[${interval[0].toFixed(digits)}, ${interval[1].toFixed(digits)}]` : "");
const meanOf = (attempts) => {
  const scores = attempts.map((attempt) => attempt.score).filter((score) => score !== null);
  return scores.length ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
};
const every = (index) => RUNS[index].curve.points;

function timeText(value) {
  if (value === null || value === undefined) return "–";
  if (value < 100) return `${value.toPrecision(2)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

function letter(index) {
  return element("b", { class: `letter ${runColour(index)}`, title: RUNS[index].run }, LETTERS[index]);
}

function rolloutLink(index, trajectory, ...content) {
  const wanted = `${encodeURIComponent(RUNS[index].key)}/${encodeURIComponent(trajectory)}`;
  return element("a", { href: INSIDE ? `#${wanted}` : `run/${encodeURIComponent(RUNS[index].page)}/#${wanted}` }, ...content);
}

// --- the list of runs ------------------------------------------------------------------------

function runLink(index) {
  const run = RUNS[index];
  const link = element("a", { href: INSIDE ? "#groups-title" : `run/${encodeURIComponent(run.page)}/`, title: `Its rollouts${run.settings ? `; settings ${run.settings}` : ""}` }, visible(run.run));
  if (INSIDE) {
    link.addEventListener("click", () => {
      byId("run").value = run.key;
      byId("run").dispatchEvent(new Event("input"));
    });
  }
  return link;
}

const began = (run) => (run.began === null ? "" : new Date(run.began * 1000).toLocaleString("sv").slice(0, 16));
const under = (value, ...below) => element("span", {}, value, element("small", {}, ...below));
const COLUMNS = [
  ["groups", (run) => (run.goal === null ? whole(run.groups) : `${whole(run.groups)} of ${whole(run.goal)}`)],
  ["scored", (run) => `${whole(run.scored)} of ${whole(run.rollouts)}`],
  ["mean score", (run) => under(figure(run.mean), run.standard_error === null ? "" : `± ${figure(run.standard_error)}`)],
  ["pass@1", (run) => passText(run, 0)],
  ["pass@k", (run) => (run.pass_at_k.length > 1 ? passText(run, run.pass_at_k.length - 1) : "–")],
  ["faults", (run) => Object.entries(run.faults).map(([fault, count]) => `${count} ${fault}`).join(", ") || "none"],
  ["tokens", (run) => under(`${compact(run.prompt_tokens)} in`, `${compact(run.completion_tokens)} out`)],
  ["cost", (run) => figure(run.cost, 2)],
  ["time", (run) => under(timeText(run.took_s), `${timeText(run.rollout_s)} each`)],
].filter(([name]) => name !== "cost" || RUNS.some((run) => run.cost !== null));

function passText(run, which) {
  const found = run.pass_at_k[which];
  if (!found) return "–";
  const shown = under(`${figure(found.value, 2)}${which ? ` (k ${found.k})` : ""}`, range(found.interval));
  shown.title = `over ${found.items} of ${run.items} tasks`;
  return shown;
}

function runRow(index) {
  const run = RUNS[index];
  const box = element("input", { type: "checkbox", id: `show:${run.key}`, "aria-label": `show ${run.run}` });
  box.checked = shownRuns.has(index);
  box.addEventListener("input", () => {
    if (box.checked) shownRuns.add(index); else shownRuns.delete(index);
    drawShown();
  });
  const name = element("th", { scope: "row" }, element("label", {}, box, letter(index)), " ", runLink(index));
  if (run.state) name.append(" ", element("span", { class: `badge ${RUN_STATES[run.state] ?? ""}`, title: visible(run.error || "") }, run.state));
  if (run.problems.length) name.append(" ", element("span", { class: "badge bad", title: run.problems.map(visible).join("\n") }, `${run.problems.length} line${run.problems.length > 1 ? "s" : ""} left out`));
  name.append(element("small", {}, [visible(run.model || "model not known"), began(run), run.verb, visible(Object.keys(run.programs).join(", "))].filter(Boolean).join(" · ")));
  return element("tr", {}, name, ...COLUMNS.map(([label, text]) => element("td", { "data-label": label }, text(run))));
}

function drawRuns() {
  const heads = ["run", ...COLUMNS.map(([label]) => label)].map((label) => element("th", { scope: "col" }, label));
  byId("runs-table").replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...RUNS.map((_, index) => runRow(index))));
}

// --- charts: drawn for the width they have, so that their text keeps its size --------------------

function frame(host, height, label) {
  const width = Math.max(260, host.clientWidth);
  const picture = drawn("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  host.replaceChildren(picture);
  const area = { left: 38, right: width - 26, top: 10, bottom: height - 24 };
  return { picture, area };
}

function written(picture, x, y, text, kind = "", anchor = "middle") {
  const made = drawn("text", { x, y, class: kind });
  made.style.textAnchor = anchor;
  made.textContent = text;
  picture.append(made);
}

function scoreAxis(picture, area, low, high) {
  const y = (score) => area.bottom - ((area.bottom - area.top) * (score - low)) / (high - low || 1);
  for (let step = 0; step <= 4; step += 1) {
    const score = low + ((high - low) * step) / 4;
    picture.append(drawn("line", { class: "grid", x1: area.left, x2: area.right, y1: y(score), y2: y(score) }));
    written(picture, area.left - 6, y(score) + 4, +score.toFixed(2), "", "end");
  }
  return y;
}

const curveX = (point) => (byId("curve-by").value === "groups" ? point[1] : point[0]);

function drawCurve() {
  const lines = shown().filter((index) => every(index).length);
  const means = lines.flatMap((index) => every(index).map((point) => point[2]));
  const said = lines.map((index) => `${LETTERS[index]} ends at ${figure(every(index).at(-1)[2], 2)}`).join(", ");
  const { picture, area } = frame(byId("curve"), 250, `Mean score as runs go on: ${said || "no scores"}`);
  const y = scoreAxis(picture, area, Math.min(0, ...means), Math.max(1, ...means));
  const end = Math.max(1, ...lines.flatMap((index) => every(index).map(curveX)));
  const x = (value) => area.left + ((area.right - area.left) * value) / end;
  const isTime = byId("curve-by").value === "time";
  const unit = !isTime ? [1, ""] : end > 5400 ? [3600, " h"] : end > 120 ? [60, " min"] : [1, " s"];
  for (const value of ticks(end / unit[0])) written(picture, x(value * unit[0]), area.bottom + 17, `${+value.toPrecision(4)}${unit[1]}`);
  const ends = [];
  for (const index of lines) {
    const points = every(index);
    const path = points.map((point) => `${x(curveX(point)).toFixed(1)},${y(point[2]).toFixed(1)}`).join(" ");
    picture.append(drawn("polyline", { class: `line ${runColour(index)}`, points: path, "stroke-dasharray": index >= COLOURS ? "5 3" : "none" }));
    for (const point of points) {
      picture.append(drawn("circle", { class: "target", cx: x(curveX(point)), cy: y(point[2]), r: 6 }, `${LETTERS[index]} ${RUNS[index].run}: ${figure(point[2])} after ${point[1]} groups, ${timeText(point[0])}`));
    }
    ends.push({ index, x: x(curveX(points.at(-1))) + 5, y: y(points.at(-1)[2]) + 4 });
  }
  ends.sort((a, b) => a.y - b.y).forEach((end, place) => {
    const above = ends.slice(0, place).filter((other) => Math.abs(other.x - end.x) < 14).at(-1);
    if (above) end.y = Math.max(end.y, above.y + 12);
    written(picture, end.x, end.y, LETTERS[end.index], `end ${runColour(end.index)}`, "start");
  });
  byId("curve-about").textContent = lines.length ? `mean of the last ${[...new Set(lines.map((index) => RUNS[index].curve.window))].join(" or ")} groups` : "no scores yet";
}

function drawPasses() {
  const ks = [...new Set(shown().flatMap((index) => RUNS[index].pass_at_k.map(({ k }) => k)))].sort((a, b) => a - b);
  const said = shown().flatMap((index) => RUNS[index].pass_at_k.map(({ k, value }) => `${LETTERS[index]} pass@${k} ${figure(value, 2)}`)).join(", ");
  const { picture, area } = frame(byId("passes"), 250, `pass@k with 95 % intervals: ${said || "no scores"}`);
  const y = scoreAxis(picture, area, 0, 1);
  const room = (area.right - area.left) / Math.max(1, ks.length);
  ks.forEach((k, place) => {
    written(picture, area.left + (place + 0.5) * room, area.bottom + 17, `k = ${k}`);
    const runs = shown().filter((index) => RUNS[index].pass_at_k.some((found) => found.k === k));
    runs.forEach((index, number) => {
      const { value, interval, items } = RUNS[index].pass_at_k.find((found) => found.k === k);
      const x = area.left + place * room + (room * (number + 1)) / (runs.length + 1);
      const tip = `${LETTERS[index]} ${RUNS[index].run}: pass@${k} ${figure(value)} ${range(interval, 3)} over ${items} items`;
      picture.append(drawn("line", { class: `line ${runColour(index)}`, x1: x, x2: x, y1: y(interval[0]), y2: y(interval[1]) }, tip), drawn("circle", { class: runColour(index), cx: x, cy: y(value), r: 4.5 }, tip));
      if (room / (runs.length + 1) > 12) written(picture, x + 7, y(value) + 4, LETTERS[index], `end ${runColour(index)}`, "start");
    });
  });
}

function share(index) {
  const all = ITEMS.flatMap((item) => item.attempts[index]);
  const counts = { full: 0, part: 0, none: 0, unscored: 0 };
  for (const attempt of all) counts[scoreKind(attempt.score)] += 1;
  const names = { full: `score ${scoreText(HIGHEST)}`, part: "between", none: `score ${scoreText(LOWEST)}`, unscored: "not scored" };
  const said = Object.keys(names).filter((kind) => counts[kind]).map((kind) => `${counts[kind]} ${names[kind]}`).join(", ");
  const picture = drawn("svg", { class: "split", viewBox: `0 0 ${Math.max(1, all.length)} 20`, preserveAspectRatio: "none", role: "img", "aria-label": said });
  let at = 0;
  for (const kind of Object.keys(names)) {
    picture.append(drawn("rect", { class: `score-${kind}`, x: at, y: 0, width: counts[kind], height: 20 }, `${counts[kind]} ${names[kind]}`));
    at += counts[kind];
  }
  return element("div", { class: "share" }, letter(index), picture, element("small", {}, said));
}

function drawErrors() {
  const columns = shown();
  const rows = ERRORS.filter((error) => columns.some((index) => error.counts[index]));
  byId("errors-panel").hidden = rows.length === 0;
  const heads = element("tr", {}, element("th", { scope: "col" }, "error"), element("th", { scope: "col" }, "whose"), ...columns.map((index) => element("th", { scope: "col" }, letter(index))));
  byId("errors").replaceChildren(element("thead", {}, heads), element("tbody", {}, ...rows.map((error) => element(
    "tr", {}, element("th", { scope: "row" }, rolloutLink(error.run, error.trajectory, visible(error.text))),
    element("td", {}, element("span", { class: `badge fault-${error.fault}` }, error.fault)),
    ...columns.map((index) => element("td", {}, error.counts[index] ? whole(error.counts[index]) : "–")),
  ))));
}

// --- two runs ----------------------------------------------------------------------------------

const pairOf = (first, second) => PAIRS[`${first} ${second}`] ?? null;

function differenceText(pair, sign) {
  const { value, interval, items, better, worse } = pair.difference;
  const limits = interval === null ? null : sign > 0 ? interval : [-interval[1], -interval[0]];
  const [up, down] = sign > 0 ? [better, worse] : [worse, better];
  const signed = `${sign * value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(3)}`;
  return { limits, signed, value: sign * value, items, up, down, same: items - better.length - worse.length };
}

function intervalPicture({ value, limits }) {
  if (limits === null) return "";
  const most = Math.max(0.05, Math.abs(limits[0]), Math.abs(limits[1])) * 1.1;
  const x = (score) => 100 + (95 * score) / most;
  const picture = drawn("svg", { class: "interval", viewBox: "0 0 200 26", role: "img", "aria-label": `the interval ${limits[0] <= 0 && limits[1] >= 0 ? "contains" : "does not contain"} 0` });
  picture.append(drawn("line", { class: "axis", x1: 100, x2: 100, y1: 0, y2: 26 }), drawn("line", { class: "line", x1: x(limits[0]), x2: x(limits[1]), y1: 13, y2: 13 }), drawn("circle", { cx: x(value), cy: 13, r: 5 }));
  return picture;
}

function taskLinks(items) {
  const most = 12;
  const links = items.slice(0, most).map((item) => {
    const link = element("a", { href: `#${encodeURIComponent(`task:${item}`)}` }, visible(item));
    link.addEventListener("click", () => openTask(item));
    return element("li", {}, link);
  });
  if (items.length > most) links.push(element("li", {}, `and ${items.length - most} more`));
  return element("ul", { class: "links" }, ...links);
}

function drawPair() {
  const [first, second] = ["first", "second"].map((id) => RUNS.findIndex((run) => run.key === byId(id).value));
  if (first < 0 || second < 0 || first === second) {
    byId("pair").replaceChildren(element("p", { class: "quiet" }, "Choose two different runs."));
    return;
  }
  const both = [RUNS[first], RUNS[second]];
  const passes = [...new Set(both.flatMap((run) => run.pass_at_k.map(({ k }) => k)))].sort((a, b) => a - b);
  const pass = (run, k) => run.pass_at_k.find((found) => found.k === k);
  const rows = [
    ["state", (run) => run.state || "–"], ["model", (run) => visible(run.model || "–")], ["began", (run) => began(run) || "–"], ["settings", (run) => run.settings || "–"],
    ...COLUMNS.filter(([name]) => !name.startsWith("pass@")),
    ...passes.map((k) => [`pass@${k}`, (run) => (pass(run, k) ? `${figure(pass(run, k).value)} ${range(pass(run, k).interval)}` : "–")]),
  ];
  const table = element("table", { class: "pair" },
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, ""), ...[first, second].map((index) => element("th", { scope: "col" }, letter(index), " ", visible(RUNS[index].run))))),
    element("tbody", {}, ...rows.map(([label, text]) => element("tr", {}, element("th", { scope: "row" }, label), ...both.map((run) => element("td", {}, text(run)))))));
  byId("pair").replaceChildren(differenceOf(first, second), element("div", { class: "scroll" }, table));
}

function differenceOf(first, second) {
  const sign = first < second ? 1 : -1;
  const pair = sign > 0 ? pairOf(first, second) : pairOf(second, first);
  const made = element("div", { class: "difference" });
  if (pair === null) made.append(element("p", { class: "quiet" }, "This page does not compare these two: agentenv runs compare does."));
  else if (pair.difference === null) made.append(element("p", { class: "quiet" }, "No task has a score in both."));
  else {
    const found = differenceText(pair, sign);
    made.append(element("p", { class: "big" }, letter(second), " − ", letter(first), " = ", element("b", {}, found.signed), ` ${range(found.limits, 3)}`, intervalPicture(found)));
    made.append(element("p", { class: "quiet" }, `Mean difference over the ${found.items} tasks with a score in both, with its 95 % interval: ${found.up.length} better, ${found.down.length} worse, ${found.same} equal.`));
    if (found.up.length) made.append(element("h3", {}, "better"), taskLinks(found.up));
    if (found.down.length) made.append(element("h3", {}, "worse"), taskLinks(found.down));
  }
  const notes = pair === null ? [] : pair.notes;
  if (notes.length) made.append(element("ul", { class: "notes" }, ...notes.map((note) => element("li", {}, visible(sign > 0 ? note : `${note} (first: ${RUNS[second].run})`)))));
  return made;
}

// --- tasks: the attempts of every run beside each other -------------------------------------------

function squares(attempts) {
  const size = 9;
  const columns = Math.max(1, Math.min(attempts.length, 16));
  const height = size * Math.max(1, Math.ceil(attempts.length / columns));
  const picture = drawn("svg", { class: "squares", width: columns * size, height, viewBox: `0 0 ${columns * size} ${height}`, "aria-hidden": "true" });
  attempts.forEach((attempt, number) => {
    picture.append(drawn("rect", { class: `score-${scoreKind(attempt.score)}`, x: (number % columns) * size, y: Math.floor(number / columns) * size, width: size - 1.5, height: size - 1.5, rx: 1.5 }, attempt.score === null ? `not scored: ${attempt.fault}` : `score ${scoreText(attempt.score)}`));
  });
  return picture;
}

function attemptCard(index, attempt, number) {
  const facts = [`${attempt.steps} step${attempt.steps === 1 ? "" : "s"}`, `${attempt.calls} call${attempt.calls === 1 ? "" : "s"}`, attempt.tokens === null ? "" : `${compact(attempt.tokens)} tokens`, timeText(attempt.took)];
  const card = element("li", { class: "attempt" },
    element("div", {}, element("span", { class: `value ${scoreKind(attempt.score)}` }, scoreText(attempt.score)), " ", rolloutLink(index, attempt.id, `attempt ${number + 1}`)),
    element("small", {}, facts.filter(Boolean).join(" · ")));
  if (attempt.fault !== "none") card.append(element("span", { class: `badge fault-${attempt.fault}` }, `${attempt.fault} fault`));
  else if (attempt.finish !== "stop") card.append(element("span", { class: "badge" }, attempt.finish.replace("_", " ")));
  if (attempt.error) card.append(element("p", { class: "said bad" }, visible(attempt.error)));
  else if (attempt.answer) card.append(element("p", { class: "said" }, visible(attempt.answer)));
  return card;
}

function taskBody(item) {
  const columns = shown().map((index) => element("div", {}, element("h4", {}, letter(index), " ", visible(RUNS[index].run)),
    item.attempts[index].length ? element("ol", { class: "attempts" }, ...item.attempts[index].map((attempt, number) => attemptCard(index, attempt, number))) : element("p", { class: "quiet" }, "not played")));
  return element("div", { class: "beside" }, ...columns);
}

// What a row shows of each run is drawn when it comes near the screen, and again when other runs are ticked.
function taskRow(item) {
  const cells = element("span", { class: "cells" });
  const summary = element("summary", {}, element("span", { class: "name", title: item.id }, visible(item.id)), cells);
  const row = element("details", { class: "task", id: `task:${item.id}` }, summary);
  const task = { item, row, means: item.attempts.map(meanOf), isNear: false, drawnFor: "", draw };
  function draw() {
    const wanted = shown().join(" ");
    if (task.drawnFor === `${wanted} ${row.open}`) return;
    task.drawnFor = `${wanted} ${row.open}`;
    cells.replaceChildren(...shown().map((index) => element("span", { class: "cell" }, letter(index), squares(item.attempts[index]), element("small", {}, figure(task.means[index], 2)))));
    row.replaceChildren(summary, ...(row.open ? [taskBody(item)] : []));
  }
  row.addEventListener("toggle", draw);
  return task;
}

const tasks = ITEMS.map(taskRow);
const taskOf = new Map(tasks.map((task) => [task.row, task]));
const near = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    taskOf.get(target).isNear = isIntersecting;
    if (isIntersecting) taskOf.get(target).draw();
  }
}, { rootMargin: "600px" });
for (const { row } of tasks) near.observe(row);

const spreadOf = (task) => {
  const means = shown().map((index) => task.means[index]).filter((mean) => mean !== null);
  return means.length > 1 ? Math.max(...means) - Math.min(...means) : 0;
};
const lowestOf = (task) => meanOf(shown().map((index) => ({ score: task.means[index] }))) ?? Infinity;

function drawTasks() {
  const words = byId("task-find").value.trim().toLowerCase();
  const keys = { name: () => 0, lowest: lowestOf, differ: (task) => -spreadOf(task) };
  const key = keys[byId("task-order").value];
  const ordered = [...tasks].sort((a, b) => key(a) - key(b) || 0);
  let count = 0;
  for (const task of ordered) {
    const isPlayed = shown().some((index) => task.item.attempts[index].length);
    task.row.hidden = !isPlayed || !task.item.id.toLowerCase().includes(words) || (byId("differing").checked && spreadOf(task) === 0);
    if (!task.row.hidden) count += 1;
    if (task.isNear || task.row.open) task.draw();
  }
  byId("tasks").replaceChildren(...ordered.map((task) => task.row));
  byId("tasks-shown").textContent = `${count} of ${tasks.length} task${tasks.length === 1 ? "" : "s"}`;
}

function openTask(name) {
  const task = tasks.find(({ item }) => item.id === name);
  if (!task) return;
  task.row.hidden = false;
  task.row.open = true;
  task.row.scrollIntoView({ block: "start" });
}

// --- all of it ---------------------------------------------------------------------------------

function drawCharts() {
  drawCurve();
  drawPasses();
}

function drawShown() {
  drawCharts();
  byId("shares").replaceChildren(...shown().map(share));
  drawErrors();
  drawTasks();
}

function drawOverview() {
  drawRuns();
  for (const id of ["first", "second"]) byId(id).append(...RUNS.map((run, index) => element("option", { value: run.key }, `${LETTERS[index]} ${visible(run.run)}`)));
  byId("two").hidden = RUNS.length < 2;
  if (RUNS.length > 1) {
    byId("first").value = RUNS.at(-2).key;
    byId("second").value = RUNS.at(-1).key;
  }
  drawShown();
  drawPair();
  for (const id of ["first", "second"]) byId(id).addEventListener("input", drawPair);
  for (const id of ["task-find", "task-order", "differing"]) byId(id).addEventListener("input", drawTasks);
  byId("curve-by").addEventListener("input", drawCurve);
  let width = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === width) return;
    width = document.documentElement.clientWidth;
    requestAnimationFrame(drawCharts);
  });
}

drawOverview();
