// The controls and the list of alerts, filled from what was loaded.

import { listAlerts } from "./alerts.js";
import { fillChoice } from "./dom.js";
import { clamp } from "./numbers.js";

export const WIDE = "(min-width: 760px)";

/** The controls for what there is to choose from; the list of alerts beside. */
export function fillControls(view) {
  const { layout, state, index, data } = view;
  const runs = index.runs.map(({ name }) => [name, name]);
  const run = index.runs.find(({ name }) => name === state.run);
  const metrics = run
    ? Object.keys(run.metrics)
        .filter((metric) => run.metrics[metric].layers)
        .sort()
    : [];
  fillChoice(layout.run.select, runs, state.run);
  fillChoice(
    layout.compare.select,
    [["", "no other run"], ...runs.filter(([name]) => name !== state.run)],
    data && data.other ? state.compare : "",
  );
  fillChoice(
    layout.mode.select,
    [
      ["side", "both maps"],
      ["difference", "their difference"],
    ],
    state.mode,
  );
  fillChoice(
    layout.metric.select,
    metrics.map((metric) => [metric, metric.replaceAll("_", " ")]),
    state.metric,
  );
  fillChoice(
    layout.scale.select,
    [
      ["most", "1\u201399 % of values"],
      ["whole", "smallest to largest"],
    ],
    state.scale,
  );
  layout.metric.select.size = window.matchMedia(WIDE).matches ? clamp(metrics.length, 2, 14) : 1;
  reveal(layout.metric.select);
  layout.compare.element.hidden = runs.length < 2;
  layout.mode.element.hidden = !(data && data.other);
  fillAlerts(view);
}

// The chosen metric may lie below the fold of a list that was just filled.
function reveal(select) {
  const option = select.selectedOptions[0];
  if (select.size < 2 || !option) return;
  const top = option.offsetTop - select.offsetTop;
  if (top < select.scrollTop || top + option.offsetHeight > select.scrollTop + select.clientHeight)
    select.scrollTop = top - select.clientHeight / 2;
}

function fillAlerts(view) {
  const alerts = view.data ? view.data.alerts[0] : [];
  const { list, count } = view.layout;
  count.textContent = `Alerts (${alerts.length})`;
  const content = JSON.stringify([view.state.run, alerts]);
  if (content === view.listed) return;
  view.listed = content;
  view.shownAlert = undefined;
  const open = new Set([...list.querySelectorAll("details[open]")].map(({ dataset }) => dataset.key));
  list.replaceChildren(...listAlerts(alerts, (alert) => view.showAlert(alert)));
  for (const details of list.querySelectorAll("details")) details.open = open.has(details.dataset.key); // what was open stays open
}
