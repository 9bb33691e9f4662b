// What is said in words beside the drawings.

import { spell, spellStep, spellSteps } from "./numbers.js";
import { columnOf, valueAt } from "./series.js";

export function sayMetric(metric, about) {
  return `${metric.replaceAll("_", " ")}${about && about.unit ? ` (${about.unit})` : ""}`;
}

export function sayKept(series, limit) {
  const binned = series.columns < series.kept ? `, in ${series.columns} columns by the worst value` : "";
  const thinned =
    limit && series.kept >= limit ? "; TensorBoard drops the others at random, the extremes of every window of steps are put back" : "";
  return `${spellStep(series.kept)} ${series.kept === 1 ? "step" : "steps"} kept${binned}${thinned}`;
}

/** One cell in a sentence: the tooltip, and what a screen reader hears. */
export function sayCell(series, metric, names, healthy, step, row) {
  if (!series.columns) return "no readings";
  const column = columnOf(series, step);
  const range =
    healthy && Number.isFinite(healthy.middle[row])
      ? `, healthy ${spell(healthy.middle[row])} (${spell(healthy.low[row])} to ${spell(healthy.high[row])})`
      : "";
  return `${spellSteps(series.first[column], series.last[column])}, ${names(row)}: ${metric} ${spell(valueAt(series, column, row))}${range}`;
}

/** A layer by its number and the name of its module. */
export function sayLayer(layers) {
  return (row) => `layer ${row}${layers[row] ? ` (${layers[row]})` : ""}`;
}

export function sayHealthy(healthy, alerts) {
  if (!healthy)
    return alerts.length ? "no healthy range: the first alert came within the first steps" : "no healthy range yet: too few steps";
  const which = healthy.alerted ? "the last ones before the first alert" : "without alerts";
  return `healthy band: 5\u201395 % of ${healthy.of ? `run ${healthy.of}, ` : ""}steps ${spellStep(healthy.from)}\u2013${spellStep(healthy.to)} (${which})`;
}

export function sayBounds(bounds) {
  return bounds.length ? `; bound ${bounds.map(spell).join(", ")}` : "";
}

export function sayNewer(run, reads) {
  return `Run ${run.name} was written by a newer collapse_monitor (log format ${run.newer}, this tab reads ${reads}). Upgrade collapse-monitor where TensorBoard runs.`;
}

export const NO_DATA =
  "No readings of collapse_monitor in this log directory yet. They appear with the first sampled step; `collapse-monitor doctor` says what is missing.";
