// What is shown to somebody who has not chosen yet.

import { valueAt, worseOf } from "./series.js";

const FIRST_METRIC = "token_similarity";

export function chooseMetric(run, wanted, alerts) {
  const has = (metric) => Boolean(run.metrics[metric]?.layers);
  if (wanted && has(wanted)) return wanted;
  const alerted = alerts.find(({ severity, metric }) => severity === "critical" && has(metric));
  if (alerted) return alerted.metric;
  return has(FIRST_METRIC) ? FIRST_METRIC : Object.keys(run.metrics).filter(has).sort()[0] || null;
}

/** Where to look first: at the first critical alert, else at the newest readings of the layer nearest to collapse. */
export function firstLook(series, about, alerts) {
  const alert = alerts.find(({ severity, state, layers }) => severity === "critical" && state === "firing" && layers.length);
  if (alert) return { step: alert.step, layer: alert.layers[0] };
  if (!series.columns || !series.rows) return {};
  const worse = worseOf(about.collapse, series.middles);
  let layer = 0;
  for (let row = 1; row < series.rows; row++) {
    const [best, value] = [valueAt(series, series.columns - 1, layer), valueAt(series, series.columns - 1, row)];
    if (worse(best, value, row) === value && value !== best) layer = row;
  }
  return { step: series.first[series.columns - 1], layer };
}
