// Trajectories are drawn when they are expanded.
const FOLD_LINES = 24;
const FOLD_CHARACTERS = 4000;
const UNFOLD_AT_ONCE = 60;
const SHORT_ARGUMENT = 60;
const KIND_NAMES = {
  slot_wait: "slot wait", prepare: "prepare", model: "model", program: "program", batch_wait: "batch wait", queue: "queued in slot",
  run: "run", transport: "transport", lost: "lost", verify: "verify", release: "release",
};

const GROUPS = parsed("data-groups");

// --- text ------------------------------------------------------------------------------------

function diffLines(text) {
  return text.split("\n").map((line) => {
    const kind = /^(\+\+\+|---)/.test(line) ? "hunk" : line.startsWith("@@") ? "hunk" : line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : "";
    return kind ? element("span", { class: kind }, `${line}\n`) : `${line}\n`;
  });
}

function preformatted(text, kind = "") {
  const shown = visible(text);
  const isDiff = /^--- .*\n\+\+\+ /m.test(shown) && /^@@ /m.test(shown);
  return element("pre", kind ? { class: kind } : {}, ...(isDiff ? diffLines(shown) : [shown]));
}

// Long text shows its end when it is output (that is where test results are), its beginning otherwise.
function folded(text, kind = "", fromEnd = false) {
  const lines = text.split("\n");
  if (lines.length <= FOLD_LINES && text.length <= FOLD_CHARACTERS) return [preformatted(text, kind)];
  const some = fromEnd ? lines.slice(-FOLD_LINES).join("\n").slice(-FOLD_CHARACTERS) : lines.slice(0, FOLD_LINES).join("\n").slice(0, FOLD_CHARACTERS);
  const preview = preformatted(some, kind);
  const whole = element("details", { class: "fold" });
  whole.append(element("summary", {}, `${fromEnd ? "end" : "beginning"} shown; expand all ${lines.length.toLocaleString("en")} lines, ${text.length.toLocaleString("en")} characters`));
  whole.addEventListener("toggle", () => {
    preview.hidden = whole.open;
    if (whole.open && whole.children.length === 1) whole.append(preformatted(text, kind));
  });
  return fromEnd ? [whole, preview] : [preview, whole];
}

function pairs(rows) {
  const list = element("dl", { class: "plain" });
  for (const [key, value] of rows) {
    const long = value.includes("\n") || value.length > 160;
    list.append(element("dt", {}, visible(key)), element("dd", {}, ...(long ? folded(value) : [visible(value)])));
  }
  return list;
}

// --- one trajectory --------------------------------------------------------------------------

const tickText = (value, end) => (value === 0 ? "0" : end >= 1 ? `${+value.toPrecision(6)} s` : `${+(value * 1000).toPrecision(6)} ms`);

function scale(end) {
  const made = element("span", { class: "scale", "aria-hidden": "true" });
  for (const value of ticks(end)) {
    const label = element("span", {}, tickText(value, end));
    label.style.left = `${(100 * value) / (end || 1)}%`;
    if (value > 0.9 * end && value > 0) label.style.transform = "translateX(-100%)";
    made.append(label);
  }
  return made;
}

// ``bars`` begin at ``start`` of an axis from 0 to ``end``; the grid marks what scale() names.
function strip(bars, end, height, start = 0) {
  const picture = drawn("svg", { class: "strip", viewBox: `0 0 1000 ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const x = (value) => (1000 * value) / (end || 1);
  for (const value of ticks(end)) picture.append(drawn("line", { class: "grid", x1: x(value), x2: x(value), y1: 0, y2: height }));
  for (const [kind, from, to] of bars) {
    picture.append(drawn("rect", { class: `k-${kind}`, x: x(start + from), y: 0, width: Math.max(1, x(to - from)), height }, `${KIND_NAMES[kind]} ${seconds(to - from)}`));
  }
  return picture;
}

function legend(bars) {
  const kinds = Object.keys(KIND_NAMES).filter((kind) => bars.some(([used]) => used === kind));
  return element("ul", { class: "legend" }, ...kinds.map((kind) => element("li", {}, element("i", { class: `k-${kind}` }), KIND_NAMES[kind])));
}

function waterfall(bars, total) {
  const rows = [];
  for (const [kind, label, start, end] of bars) {
    const isCall = ["batch_wait", "queue", "run", "transport", "lost"].includes(kind);
    const last = rows[rows.length - 1];
    if (isCall && last && last.isCall && Math.abs(last.end - start) < 1e-5 && last.label === label) {
      last.parts.push([kind, start, end]);
      last.end = end;
    } else rows.push({ isCall, label, kind, parts: [[kind, start, end]], start, end });
  }
  const grid = element("div", { class: "waterfall", role: "img", "aria-label": `Timing of ${rows.length} steps over ${seconds(total)}` });
  for (const row of rows) {
    const parts = row.parts.map(([kind, from, to]) => `${KIND_NAMES[kind]} ${seconds(to - from)}`).join(", ");
    const tip = `${row.isCall ? `${visible(row.label)}: ` : ""}${parts} (from ${seconds(row.start)} to ${seconds(row.end)})`;
    const picture = strip(row.parts, total, 13);
    picture.removeAttribute("class");
    const name = row.isCall ? row.label : row.label && row.label !== KIND_NAMES[row.kind] ? `${KIND_NAMES[row.kind]} · ${row.label}` : KIND_NAMES[row.kind];
    grid.append(element("div", { class: "row", title: tip }, element("span", { title: tip }, visible(name)), element("span", { title: tip }, picture), element("span", { class: "took", title: tip }, seconds(row.end - row.start))));
  }
  grid.append(element("span"), scale(total), element("span"));
  return element("div", {}, legend(bars), grid);
}

function callTop(call) {
  const marks = [];
  const mark = (text, kind) => marks.push(element("span", { class: `badge ${kind}` }, text));
  if (call.lost) mark("no result", "bad");
  if (call.fault && call.fault !== "none") mark(`${call.fault} fault${call.error ? `: ${call.error}` : ""}`, `fault-${call.fault}`);
  for (const flag of call.flags || []) mark(flag.replace("_", " "), "bad");
  if (call.goesOn) mark("still running", "");
  if (call.exit !== null && call.exit !== undefined) mark(`exit ${call.exit}`, call.exit === 0 ? "" : "warn");
  const facts = call.took === undefined ? [] : [seconds(call.took)];
  if (call.back === false) facts.push("nothing of it came back");
  else if (call.within) facts.push(`within ${seconds(call.within)}`); // an agent program ran it
  if (call.batchWait > 0.0005) facts.push(`batch wait ${seconds(call.batchWait)}`);
  if (call.run) facts.push(`run ${seconds(call.run)}`);
  if (call.queue > 0.0005) facts.push(`queued ${seconds(call.queue)}`);
  if (call.cpu) facts.push(`CPU ${seconds(call.cpu)}`);
  if (call.memory) facts.push(`peak ${bytes(call.memory)}`);
  return element("div", { class: "top" }, element("code", {}, visible(call.tool)), ...marks, ...facts.map((fact) => element("span", {}, fact)));
}

function callArguments(call) {
  if (typeof call.arguments === "string") return call.arguments ? folded(call.arguments, "command") : [];
  const given = Object.entries(call.arguments).filter(([, value]) => value);
  const isShort = ([key, value]) => key !== "command" && value.length <= SHORT_ARGUMENT && !value.includes("\n");
  const line = given.filter(isShort).flatMap(([key, value]) => [element("span", {}, visible(key), " ", element("code", {}, visible(value)))]);
  const shown = line.length ? [element("div", { class: "given" }, ...line)] : [];
  for (const [key, value] of given.filter((argument) => !isShort(argument))) {
    if (key !== "command") shown.push(element("div", { class: "label" }, visible(key)));
    shown.push(...folded(value, key === "command" ? "command" : ""));
  }
  return shown;
}

function callOutput(label, stream, kind) {
  if (!stream) return [];
  const dropped = stream.dropped ? ` · ${bytes(stream.dropped)} dropped from the middle by the output cap` : "";
  return [element("div", { class: "label" }, `${label}${dropped}`), ...folded(stream.text, kind, true)];
}

function toolCall(call) {
  const made = element("div", { class: "call" }, callTop(call), ...callArguments(call));
  if (call.message) made.append(element("p", { class: "said bad" }, visible(call.message)));
  made.append(...callOutput("stdout", call.out, ""), ...callOutput("stderr", call.err, "err"));
  if (call.content) made.append(element("div", { class: "label" }, "reply"), ...folded(call.content));
  if (call.image) made.append(element("img", { class: "screenshot", src: call.image, alt: "screenshot" }));
  if (call.image === "") made.append(element("p", { class: "said" }, "The screenshot is left out of this page; the records have it."));
  if (call.shown) made.append(element("div", { class: "label" }, "shown to the model"), ...folded(call.shown));
  return made;
}

function turn(said) {
  const number = said.index === undefined ? (said.own ? " · written by the program" : "") : ` · step ${said.index + 1}`;
  const who = element("div", { class: "who" }, element("b", {}, said.role + number));
  if (said.model !== undefined) who.append(element("span", {}, `model ${seconds(said.model)}`));
  if (said.usage && said.usage.completion_tokens !== undefined) who.append(element("span", {}, `${said.usage.prompt_tokens ?? "?"} → ${said.usage.completion_tokens} tokens`));
  if (said.dialect) who.append(element("span", {}, said.dialect));
  const made = element("div", { class: `turn ${said.role === "assistant" ? "assistant" : ""}` }, who);
  if (said.thought) made.append(element("details", { class: "fold" }, element("summary", {}, "reasoning"), ...folded(said.thought)));
  if (said.text) {
    const long = said.text.length > FOLD_CHARACTERS || said.role === "tool" || said.text.split("\n").length > FOLD_LINES;
    made.append(...(long ? folded(said.text) : [element("p", { class: "said" }, visible(said.text))]));
  }
  made.append(...(said.calls || []).map(toolCall));
  return made;
}

function conversation(one) {
  const about = [`${one.steps} turn${one.steps === 1 ? "" : "s"}`, one.tools.length ? `tools ${one.tools.join(", ")}` : "no tools"];
  if (one.behind !== undefined) about.push(`began behind step ${one.behind + 1} of conversation ${one.of + 1}`);
  const marks = [...(one.main ? [["main", "badge"]] : []), ...(one.trained ? [] : [["not trained", "badge warn"]])];
  const made = element("details", { class: "conversation" }, element("summary", {}, element("b", {}, `Conversation ${one.number + 1}`),
    ...marks.flatMap(([text, kind]) => [" ", element("span", { class: kind }, text)]), " ", element("small", {}, visible(about.join(" · ")))));
  made.open = one.main;
  if (one.before.length) made.append(element("details", { class: "fold" }, element("summary", {}, `the ${one.before.length} messages before it`), ...one.before.map(turn)));
  made.append(...one.turns.map(turn));
  return made;
}

function program(about) {
  return [
    element("p", { class: "said" }, element("b", {}, visible(about.name)), `, ${seconds(about.took)}`), pairs(about.facts),
    element("div", { class: "call" }, ...callOutput("stdout", about.out, ""), ...callOutput("stderr", about.err, "err"), ...(about.out || about.err ? [] : [element("small", {}, "It printed nothing.")])),
  ];
}

function section(title, ...content) {
  return content.length ? [element("h3", {}, title), ...content] : [];
}

// Its addresses live as long as the page: a few, and only of what was expanded.
function recordings(casts) {
  return Object.entries(casts).map(([name, cast]) => {
    const address = URL.createObjectURL(new Blob([cast], { type: "application/x-asciicast" }));
    const link = element("a", { href: address, download: `${name}.cast` }, `${visible(name)}.cast`);
    return element("p", { class: "said" }, link, ` (${bytes(cast.length)}; asciinema play FILE)`);
  });
}

function trajectoryBody(number) {
  const body = parsed(`data-${number}`);
  const made = element("div", { class: "body" });
  if (body.error) made.append(...section("Error", preformatted(body.error, "err")));
  if (body.earlier.length) made.append(...section(`Earlier attempts (${body.earlier.length})`, ...body.earlier.map((error) => preformatted(error, "err"))));
  if (body.bars.length) made.append(...section("Time", waterfall(body.bars, body.total)));
  if (body.program) made.append(...section("Agent program", ...program(body.program)), ...section("Conversations", ...body.conversations.map(conversation)));
  else made.append(...section("Conversation", ...body.turns.map(turn)));
  made.append(...section("tmux recordings", ...recordings(body.recordings)));
  if (body.verification.length) made.append(...section("Verification", pairs(body.verification)));
  const rest = [["began", new Date(body.began * 1000).toISOString()], ...body.workspace, ...Object.entries(body.totals).map(([key, value]) => [key, String(value)])];
  made.append(element("details", { class: "fold" }, element("summary", {}, "Details"), pairs(rest)));
  return made;
}

// Rollouts of several runs may have the same name.
const anchorOf = (group, member) => (group.run ? `${group.run}/${member.id}` : member.id);

function trajectoryRow(member, group) {
  const summary = element("summary", {});
  const badges = [];
  if (member.fault !== "none") badges.push(element("span", { class: `badge fault-${member.fault}` }, `${member.fault} fault`));
  if (member.attempt > 1) badges.push(element("span", { class: "badge warn" }, `attempt ${member.attempt}`));
  if (member.finish !== "stop" && member.finish !== "fault") badges.push(element("span", { class: "badge" }, member.finish.replace("_", " ")));
  if (member.exit) badges.push(element("span", { class: "badge warn" }, `exit ${member.exit}`));
  if (member.conversations > 1) badges.push(element("span", { class: "badge" }, `${member.conversations} conversations`));
  if (member.timedOut) badges.push(element("span", { class: "badge warn" }, `${member.timedOut} timed out`));
  if (member.callFaults) badges.push(element("span", { class: "badge warn" }, `${member.callFaults} call fault${member.callFaults > 1 ? "s" : ""}`));
  const rest = member.id.startsWith(group.id) ? member.id.slice(group.id.length).replace(/^[-:/._]+/, "") || member.id : member.id;
  const short = /^\d+$/.test(rest) ? `rollout ${rest}` : rest;
  const link = element("a", { class: "link", href: `#${anchorOf(group, member).split("/").map(encodeURIComponent).join("/")}`, title: "Link to this trajectory" }, visible(short));
  summary.append(
    element("span", { class: `value ${scoreKind(member.score)}`, "aria-label": member.score === null ? "not scored" : `score ${scoreText(member.score)}` }, scoreText(member.score)),
    element("span", { class: "name mono", title: member.id }, link),
    strip(member.bars, group.span, 10, member.start),
    element("span", { class: "counts" }, `${member.steps} step${member.steps === 1 ? "" : "s"}, ${member.calls} call${member.calls === 1 ? "" : "s"}`),
    element("span", { class: "took" }, seconds(member.total)),
  );
  if (badges.length) summary.append(element("span", { class: "marks" }, ...badges));
  const row = element("details", { class: "trajectory", id: `t:${anchorOf(group, member)}` }, summary);
  row.addEventListener("toggle", () => { if (row.open) drawBody(row, member.body); });
  return row;
}

function drawBody(row, number) {
  if (row.children.length > 1) return;
  row.append(trajectoryBody(number));
}

// --- groups ----------------------------------------------------------------------------------

function statistics(group) {
  const scores = group.members.map((member) => member.score).filter((score) => score !== null);
  const mean = scores.length ? scores.reduce((sum, score) => sum + score, 0) / scores.length : null;
  return { scores, mean, spread: scores.length ? Math.max(...scores) - Math.min(...scores) : 0, longest: Math.max(0, ...group.members.map((member) => member.total)) };
}

function dots(group, numbers) {
  const picture = drawn("svg", { class: "dots", viewBox: "0 0 200 34", role: "img", "aria-label": `Scores: ${group.members.map((member) => (member.score === null ? "not scored" : scoreText(member.score))).join(", ")}` });
  picture.append(drawn("line", { class: "rail", x1: 10, x2: 190, y1: 22, y2: 22 }));
  for (const [x, score] of [[10, LOWEST], [190, HIGHEST]]) {
    const label = drawn("text", { x, y: 34 });
    label.textContent = scoreText(score);
    picture.append(label);
  }
  const stacked = new Map();
  for (const member of group.members) {
    if (member.score === null) continue;
    const x = 10 + 180 * onAxis(member.score);
    const place = Math.round(x / 9);
    const level = stacked.get(place) || 0;
    stacked.set(place, level + 1);
    picture.append(drawn("circle", { class: scoreKind(member.score), cx: x, cy: 22 - Math.min(level, 4) * 6, r: 4.5 }, `${member.id}: ${scoreText(member.score)}`));
  }
  if (numbers.mean !== null) picture.append(drawn("rect", { x: 9.25 + 180 * onAxis(numbers.mean), y: 28, width: 1.5, height: 6, fill: "currentColor" }, `mean ${numbers.mean.toFixed(2)}`));
  return picture;
}

function groupCard(group) {
  const numbers = statistics(group);
  const missing = group.size - numbers.scores.length;
  const title = element("div", {}, element("h4", {}, visible(group.item)));
  if (group.run) title.append(" ", element("small", {}, `run ${visible(group.runName)}`));
  if (group.outcome !== "complete") title.append(" ", element("span", { class: `badge ${group.outcome === "retry" ? "bad" : "warn"}` }, group.outcome === "retry" ? "to be retried" : `partial: ${numbers.scores.length} of ${group.size}`));
  const mean = element("div", { class: "mean" }, ...(numbers.mean === null ? ["not scored"] : ["mean ", element("b", {}, numbers.mean.toFixed(2))]), missing > 0 && numbers.mean !== null ? `, ${missing} missing` : "");
  const card = element("li", { class: "group" }, element("header", {}, title, dots(group, numbers), mean));
  if (group.details.length) {
    const about = element("details", { class: "about" }, element("summary", {}, "the task"));
    about.addEventListener("toggle", () => { if (about.open && about.children.length === 1) about.append(pairs(group.details)); });
    card.append(about);
  }
  const rows = group.members.map((member) => trajectoryRow(member, group));
  const axis = element("div", { class: "axis-row" }, scale(group.span));
  card.append(element("div", { class: "members" }, ...(group.members.length ? [axis] : []), ...rows));
  return { group, card, rows, numbers };
}

// --- filters, order, links ---------------------------------------------------------------------

const cards = GROUPS.map(groupCard);
const list = byId("groups");
const texts = new Map(); // of a body's number: all its text, once it was searched
const LEFT_OUT = "characters are left out of this page"; // as the page's data marks its cuts

function strings(value) {
  if (value === null || typeof value !== "object") return String(value);
  return Object.values(value).map(strings).join("\n");
}

function textOf(group, member) {
  if (!texts.has(member.body)) texts.set(member.body, `${group.item}\n${strings(parsed(`data-${member.body}`))}`.toLowerCase());
  return texts.get(member.body);
}

function fits(group, member) {
  if (byId("run") && byId("run").value && byId("run").value !== group.run) return false;
  const wanted = byId("score").value;
  if (wanted !== "any" && scoreKind(member.score) !== wanted) return false;
  return !byId("faulty").checked || member.fault !== "none" || member.finish === "program_failed" || member.callFaults > 0 || member.attempt > 1;
}

function applyFilters() {
  const words = byId("find").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const { group, card, rows } of cards) {
    let here = 0;
    group.members.forEach((member, index) => {
      const shown = fits(group, member) && words.every((word) => textOf(group, member).includes(word));
      rows[index].hidden = !shown;
      here += shown ? 1 : 0;
    });
    const unfiltered = words.length === 0 && byId("score").value === "any" && !byId("faulty").checked && !byId("run")?.value;
    card.hidden = here === 0 && !unfiltered;
    count += here;
  }
  const total = cards.reduce((sum, { rows }) => sum + rows.length, 0);
  const trajectories = count === total ? `${total} trajectories` : `${count} of ${total} trajectories`;
  const cut = words.length > 0 && [...texts.values()].some((text) => text.includes(LEFT_OUT));
  byId("shown").textContent = cut ? `${trajectories}; what is left out of this page was not searched` : trajectories;
  byId("nothing").hidden = cards.some(({ card }) => !card.hidden);
}

function applyOrder() {
  const keys = { run: () => 0, mean: (card) => card.numbers.mean ?? Infinity, spread: (card) => -card.numbers.spread, long: (card) => -card.numbers.longest };
  const key = keys[byId("order").value];
  list.append(...[...cards].sort((a, b) => key(a) - key(b) || 0).map(({ card }) => card));
}

// A link may name the run also where the page has only one.
function follow() {
  let wanted = location.hash.slice(1);
  try { wanted = decodeURIComponent(wanted); } catch { return; }
  if (!wanted) return;
  for (const marked of list.querySelectorAll(".marked")) marked.classList.remove("marked");
  for (const leadsTo of [(group, member) => anchorOf(group, member) === wanted, (_, member) => wanted.endsWith(`/${member.id}`) || member.id === wanted]) {
    for (const { group, card, rows } of cards) {
      const index = group.members.findIndex((member) => leadsTo(group, member));
      if (index < 0) continue;
      card.hidden = rows[index].hidden = false;
      rows[index].open = true;
      drawBody(rows[index], group.members[index].body);
      rows[index].classList.add("marked");
      rows[index].scrollIntoView({ block: "start" });
      return;
    }
  }
}

function shownRows() {
  return cards.filter(({ card }) => !card.hidden).flatMap(({ rows }) => rows.filter((row) => !row.hidden));
}

for (const id of ["find", "score", "faulty", "run"]) byId(id)?.addEventListener("input", applyFilters);
byId("order").addEventListener("input", applyOrder);
byId("unfold").addEventListener("click", () => shownRows().slice(0, UNFOLD_AT_ONCE).forEach((row) => { row.open = true; }));
byId("fold").addEventListener("click", () => list.querySelectorAll("details.trajectory[open]").forEach((row) => { row.open = false; }));
window.addEventListener("hashchange", follow);

applyOrder();
applyFilters();
follow();
