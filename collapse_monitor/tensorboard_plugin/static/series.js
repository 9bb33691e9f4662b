// Questions to columns of readings: which column stands for a step, what is worst, what was healthy.

import { quantile, sortedFinite } from "./numbers.js";

const HEALTHY_COLUMNS = 50;
const FEWEST_HEALTHY = 5;

export function valueAt(series, column, row) {
  return row >= 0 && row < series.rows && column >= 0 && column < series.columns ? series.values[column * series.rows + row] : NaN;
}

/** The column that stands for a step: the last one that begins at or before it, the first one before all of them. */
export function columnOf(series, step) {
  let low = 0;
  let high = series.columns - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (series.first[middle] <= step) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** The steps a series reaches over: the last column is as wide as columns usually are. */
export function extentOf(series) {
  if (!series || !series.columns) return null;
  const gaps = [];
  for (let column = 1; column < series.columns; column++) gaps.push(series.first[column] - series.first[column - 1]);
  return { from: series.first[0], to: series.last[series.columns - 1] + (gaps.length ? quantile(sortedFinite(gaps), 0.5) : 1) };
}

/** Which of two values is worse: nearest to collapse, or farthest from the middle where neither end means collapse. */
export function worseOf(collapse, middles) {
  const badness = (value, row) => (collapse === "high" ? value : collapse === "low" ? -value : Math.abs(value - middles[row]));
  return (a, b, row) => {
    if (Number.isNaN(a)) return b;
    if (Number.isNaN(b)) return a;
    if (!Number.isFinite(a)) return a;
    if (!Number.isFinite(b)) return b;
    return badness(b, row) > badness(a, row) ? b : a;
  };
}

/** Per row the median of its finite values, of at most some hundred columns. */
export function middlesOf(series) {
  const stride = Math.max(1, Math.floor(series.columns / 300));
  return Array.from({ length: series.rows }, (_, row) => {
    const values = [];
    for (let column = 0; column < series.columns; column += stride) values.push(valueAt(series, column, row));
    return quantile(sortedFinite(values), 0.5) || 0;
  });
}

/** The run's own healthy range per row: of the last columns before the first alert. Null where it was ill from the start. */
export function healthyOf(series, alerts) {
  const ill = alerts.filter((alert) => alert.state === "firing" && alert.severity !== "info").map((alert) => alert.since);
  const until = ill.length ? Math.min(...ill) : Infinity;
  let end = 0;
  while (end < series.columns && series.last[end] < until) end++;
  if (end < FEWEST_HEALTHY) return null;
  const start = Math.max(0, end - HEALTHY_COLUMNS);
  const range = { from: series.first[start], to: series.last[end - 1], alerted: ill.length > 0, low: [], middle: [], high: [] };
  for (let row = 0; row < series.rows; row++) {
    const values = [];
    for (let column = start; column < end; column++) values.push(valueAt(series, column, row));
    const sorted = sortedFinite(values);
    range.low.push(quantile(sorted, 0.05));
    range.middle.push(quantile(sorted, 0.5));
    range.high.push(quantile(sorted, 0.95));
  }
  return range;
}

/** The bounds that alerts on a layer were held against. */
export function boundsOf(alerts, metric, layer) {
  const bounds = new Set();
  for (const alert of alerts) {
    if (alert.metric === metric && alert.layers.includes(layer) && alert.bound !== null) bounds.add(Number(alert.bound));
    for (const evidence of alert.finding ? alert.finding.evidence : []) {
      if (evidence.metric === metric && evidence.layers.includes(layer) && evidence.bound !== null) bounds.add(Number(evidence.bound));
    }
  }
  return [...bounds].filter(Number.isFinite).sort((a, b) => a - b);
}

/** What the drawings need to know of a series: how wide its last column is, and the middle of each row. */
export function prepare(series, tail = 0) {
  const extent = extentOf(series);
  series.tail = Math.max(tail, extent ? extent.to - series.last[series.columns - 1] : 1);
  series.middles = middlesOf(series);
  return series;
}

/** The steps that any of several series reaches over. */
export function unite(extents) {
  const known = extents.filter(Boolean);
  return known.length ? { from: Math.min(...known.map(({ from }) => from)), to: Math.max(...known.map(({ to }) => to)) } : null;
}
