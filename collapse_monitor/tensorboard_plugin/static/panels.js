// The colour bar, and the drawings below the heat map: the chosen layer, its heads, the chosen step.

import { sayBounds, sayHealthy, sayKept } from "./captions.js";
import { describeEnds, describeScale, drawColourBar, orderedScale } from "./colours.js";
import { drawCurve } from "./curve.js";
import { clamp, spellSteps } from "./numbers.js";
import { drawProfile } from "./profile.js";
import { boundsOf, columnOf, valueAt } from "./series.js";

export function drawColours(view) {
  const { bar, ends, barText } = view.layout;
  drawColourBar(bar, view.scale);
  describeEnds(view.scale, view.data.names).forEach((text, end) => (ends[end].textContent = text));
  barText.textContent = describeScale(view.scale);
  bar.setAttribute("aria-label", `Colour scale from ${ends[0].textContent} to ${ends[1].textContent}: ${barText.textContent}`);
}

/** The lines of the drawings below: the run, and the one it is compared with. */
function linesOf(view, make) {
  return view.data.series.map((series, number) => ({
    ...make(series),
    colour: number ? view.colours.second : view.colours.accent,
    dashed: number > 0,
  }));
}

export function drawLayer(view, range) {
  const { data, state } = view;
  const { title, caption, body, element } = view.layout.curve;
  element.hidden = state.layer === null || state.layer >= data.series[0].rows;
  if (element.hidden) return;
  const bounds = boundsOf(data.alerts[0], data.metric, state.layer);
  const alerts = data.alerts[0].filter(({ metric, layers }) => metric === data.metric && layers.includes(state.layer));
  title.textContent = `Layer ${state.layer} \u00b7 ${data.run.layers[state.layer] || ""}`;
  caption.textContent = `${data.other ? `solid ${data.names[0]}, dashed ${data.names[1]}; ` : ""}other layers grey; ${sayHealthy(data.healthy, data.alerts[0])}${sayBounds(bounds)}`;
  drawCurve(body, {
    lines: linesOf(view, (series) => ({ series })),
    layer: state.layer,
    range,
    step: state.step,
    healthy: data.healthy,
    bounds,
    alerts,
    colours: view.colours,
  });
}

export function drawHeads(view) {
  const { data, state } = view;
  const { title, caption, element } = view.layout.heads;
  const heads = data ? data.heads : null;
  element.hidden = !heads || !heads.rows || state.layer === null;
  if (element.hidden) return;
  const scale = orderedScale([heads], data.about, state.scale === "whole");
  title.textContent = `Heads of layer ${state.layer} \u00b7 head \u00d7 step`;
  caption.textContent = `${sayKept(heads)}; colour ${describeScale(scale)}`;
  view.headMap.draw({
    series: heads,
    scale,
    range: view.range(),
    middles: heads.middles,
    marks: [],
    selection: { step: state.step, row: view.head },
    colours: view.colours,
    height: heightOf(heads.rows, 280),
  });
}

export function drawStep(view) {
  const { data, state } = view;
  const { title, caption, body, element } = view.layout.profile;
  element.hidden = state.step === null || !data.series[0].columns;
  if (element.hidden) return;
  const profile = (series) => ({
    values: Array.from({ length: series.rows }, (_, row) => valueAt(series, columnOf(series, state.step), row)),
  });
  const column = columnOf(data.series[0], state.step);
  title.textContent = `Depth profile at ${spellSteps(data.series[0].first[column], data.series[0].last[column])}`;
  caption.textContent = `${data.other ? `solid ${data.names[0]}, dashed ${data.names[1]}; ` : ""}layers from first to last; ${sayHealthy(data.healthy, data.alerts[0])}`;
  drawProfile(body, { lines: linesOf(view, profile), layer: state.layer, healthy: data.healthy, colours: view.colours });
}

/** Of a heat map, so that rows can be told apart and the page stays short. */
export function heightOf(rows, most) {
  return clamp(36 + 24 * rows, 120, most);
}
