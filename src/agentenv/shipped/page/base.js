// What every page of agentenv has in common. Everything that came from a run is put on a page as text (textContent,
// attributes set by name), never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function drawn(name, attributes, title) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (title) {
    const tip = document.createElementNS(SVG, "title");
    tip.textContent = title;
    made.append(tip);
  }
  return made;
}

function seconds(value) {
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return value >= 0.1 ? `${(value * 1000).toFixed(0)} ms` : `${(value * 1000).toFixed(1)} ms`;
}

function bytes(value) {
  if (value < 1024) return `${value} B`;
  const units = ["KiB", "MiB", "GiB"];
  let unit = -1;
  do { value /= 1024; unit += 1; } while (value >= 1024 && unit < 2);
  return `${value.toFixed(1)} ${units[unit]}`;
}

// Terminal colours are dropped; other control characters are shown as their pictures, so that nothing hides.
function visible(text) {
  return text
    .replace(/\r\n/g, "\n")
    .replace(/\x1b\[[0-9;:?]*[ -/]*[@-~]/g, "")
    .replace(/[\x00-\x08\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
    .replace(/[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\u2421");
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}
