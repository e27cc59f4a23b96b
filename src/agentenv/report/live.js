// The end of every page: links into it, and, while it is served, what changes. Controls with an id, and what is
// expanded, are kept when it loads itself again.
const WATCH_MS = 2000;

const controls = () => [...document.querySelectorAll("main input[id], main select[id]")];

function remember() {
  const values = Object.fromEntries(controls().map((control) => [control.id, control.type === "checkbox" ? control.checked : control.value]));
  const open = [...document.querySelectorAll("main details[open][id]")].map((row) => row.id);
  sessionStorage.setItem(location.pathname, JSON.stringify({ values, open, at: window.scrollY }));
}

function recall() {
  const kept = JSON.parse(sessionStorage.getItem(location.pathname) || "null");
  if (kept === null) return;
  for (const control of controls()) {
    const value = kept.values[control.id];
    if (value === undefined || value === (control.type === "checkbox" ? control.checked : control.value)) continue;
    if (control.type === "checkbox") control.checked = value;
    else if (control.tagName !== "SELECT" || [...control.options].some((option) => option.value === value)) control.value = value;
    control.dispatchEvent(new Event("input"));
  }
  for (const id of kept.open) if (byId(id)) byId(id).open = true;
  requestAnimationFrame(() => window.scrollTo(0, kept.at));
}

async function watch() {
  try {
    const reply = await fetch("version");
    if (reply.ok && (await reply.text()) !== document.body.dataset.version) {
      remember();
      location.reload();
      return;
    }
  } catch { /* the server has ended, or does not answer yet */ }
  setTimeout(watch, WATCH_MS);
}

byId("theme").addEventListener("click", switchTheme);
if (document.body.dataset.version) {
  recall();
  setTimeout(watch, WATCH_MS);
}
document.documentElement.dataset.ready = "yes";
