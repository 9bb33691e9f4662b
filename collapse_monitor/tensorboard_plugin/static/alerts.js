// The list of alerts: what, how bad, where, since when; opened, the finding with its evidence, causes and remedies.

import { make } from "./dom.js";
import { spell, spellRanges, spellStep } from "./numbers.js";

/** All alerts, newest first. `choose(alert)` shows it in the drawings. */
export function listAlerts(alerts, choose) {
  if (!alerts.length) return [make("p", { className: "soft" }, "No alert in this run.")];
  return [...alerts].reverse().map((alert) => entry(alert, choose));
}

export function sayAlert(alert) {
  return `${alert.severity} alert at step ${spellStep(alert.step)}: ${words(alert.rule)} ${alert.state}, ${sayLayers(alert.layers)}`;
}

function entry(alert, choose) {
  const show = make(
    "button",
    { type: "button", className: "show", onclick: () => choose(alert), "aria-label": `Show ${sayAlert(alert)}` },
    `step ${spellStep(alert.step)}`,
  );
  const title = make("span", { className: "rule" }, words(alert.rule));
  const state = alert.state === "firing" ? alert.severity : `${words(alert.state)}`;
  const where = make("span", { className: "soft" }, `${state} \u00b7 ${sayLayers(alert.layers)} \u00b7 since ${spellStep(alert.since)}`);
  const details = make(
    "details",
    { dataset: { key: `${alert.step}/${alert.rule}/${alert.state}` } },
    make("summary", {}, title, " ", where),
  );
  // A run may have thousands of alerts: what is said of one is made when somebody opens it.
  details.addEventListener("toggle", () => details.append(...explain(alert)), { once: true });
  return make("div", { className: `alert ${alert.state === "firing" ? alert.severity : "over"}`, role: "listitem" }, show, details);
}

function explain(alert) {
  const { finding } = alert;
  const parts = [make("p", {}, alert.message)];
  if (!finding) return parts;
  if (finding.evidence.length) parts.push(make("h4", {}, "Evidence"), tabulate(finding.evidence));
  for (const note of finding.notes || []) parts.push(make("p", { className: "soft" }, note));
  for (const [title, lines] of [
    ["What to do", finding.remedies],
    ["Usual causes", finding.causes],
    ["What speaks against it", finding.against],
  ]) {
    if (lines.length) parts.push(make("h4", {}, title), make("ul", {}, ...lines.map((line) => make("li", {}, line))));
  }
  if (finding.anchor) parts.push(make("p", { className: "soft" }, `Documentation: docs/${finding.anchor}`));
  return parts;
}

function tabulate(evidence) {
  const cells = (row) => [
    words(row.metric),
    spell(number(row.value)),
    row.baseline === null ? "none yet" : spell(number(row.baseline)),
    row.bound === null ? "\u2013" : spell(number(row.bound)),
  ];
  const head = ["reading", "value", "baseline", "bound"].map((text) => make("th", { scope: "col" }, text));
  const rows = evidence.map((row) => make("tr", {}, ...cells(row).map((text) => make("td", {}, text))));
  return make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows));
}

function sayLayers(layers) {
  if (!layers.length) return "the run as a whole";
  return `${layers.length > 1 ? "layers" : "layer"} ${spellRanges(layers)}`;
}

function words(name) {
  return name.replaceAll("_", " ");
}

// Infinities travel as text, nan as null.
function number(value) {
  return value === "inf" ? Infinity : value === "-inf" ? -Infinity : value === null ? NaN : Number(value);
}
