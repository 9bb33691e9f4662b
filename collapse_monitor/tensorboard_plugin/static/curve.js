// One layer over the steps: its curve among the others', its healthy range, the bounds it was held against, its alerts.

import { drawStepAxis, drawValueAxis, prepareCanvas, valueScale } from "./axes.js";
import { quantile, sortedFinite } from "./numbers.js";
import { valueAt } from "./series.js";

const HEIGHT = 190;
const MOST_OTHERS = 64;

/** lines: [{ series, colour, dashed }], the first one's healthy range and other layers are shown. */
export function drawCurve(canvas, { lines, layer, range, step, healthy, bounds, alerts, colours }) {
  const frame = prepareCanvas(canvas, HEIGHT);
  if (!frame || !lines.length) return;
  const { context, plot } = frame;
  const x = (at) => plot.left + ((at - range.from) / (range.to - range.from)) * plot.width;
  const others = sortedFinite(visibleValues(lines[0].series, null, range));
  const values = [
    ...lines.flatMap(({ series }) => visibleValues(series, layer, range)),
    quantile(others, 0.02),
    quantile(others, 0.98),
  ].filter(Number.isFinite);
  // A bound far from all readings would flatten the curve: it is in the caption all the same.
  const spread = Math.max(...values) - Math.min(...values);
  const near = bounds.filter((bound) => bound >= Math.min(...values) - 2 * spread && bound <= Math.max(...values) + 2 * spread);
  const scale = valueScale(plot, [...values, ...near]);
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top - 4, plot.width, plot.height + 8);
  context.clip();
  if (healthy && Number.isFinite(healthy.middle[layer])) {
    context.fillStyle = colours.healthy;
    const top = scale.at(healthy.high[layer]);
    context.fillRect(plot.left, top, plot.width, Math.max(2, scale.at(healthy.low[layer]) - top));
    rule(context, plot, scale.at(healthy.middle[layer]), colours.soft, [2, 3]);
  }
  const { series } = lines[0];
  context.globalAlpha = 0.35;
  const stride = Math.max(1, Math.ceil(series.rows / MOST_OTHERS));
  for (let row = 0; row < series.rows; row += stride) if (row !== layer) trace(context, series, row, x, scale, colours.faint, 1);
  context.globalAlpha = 1;
  for (const line of [...lines].reverse()) trace(context, line.series, layer, x, scale, line.colour, 2, line.dashed ? [5, 3] : []);
  for (const bound of near) rule(context, plot, scale.at(bound), colours.critical, [6, 4]);
  for (const alert of alerts) mark(context, x(alert.step), plot, colours[alert.severity] || colours.info);
  if (step !== null) {
    context.fillStyle = colours.text;
    context.fillRect(x(step), plot.top, 1, plot.height);
  }
  context.restore();
  drawStepAxis(frame, range, colours);
  drawValueAxis(frame, scale, colours);
}

// Of one layer, or of all of them.
function visibleValues(series, layer, range) {
  const values = [];
  for (let column = 0; column < series.columns; column++) {
    if (series.last[column] < range.from || series.first[column] > range.to) continue;
    for (let row = layer ?? 0; row <= (layer ?? series.rows - 1); row++) {
      const value = valueAt(series, column, row);
      if (Number.isFinite(value)) values.push(value);
    }
  }
  return values;
}

function trace(context, series, row, x, scale, colour, width, dash = []) {
  context.beginPath();
  let drawn = false;
  for (let column = 0; column < series.columns; column++) {
    const value = valueAt(series, column, row);
    if (!Number.isFinite(value)) {
      drawn = false;
      continue;
    }
    const at = x(series.first[column]);
    if (drawn) context.lineTo(at, scale.at(value));
    else context.moveTo(at, scale.at(value));
    drawn = true;
  }
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.setLineDash(dash);
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
}

function rule(context, plot, y, colour, dash) {
  context.strokeStyle = colour;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(plot.left, y);
  context.lineTo(plot.left + plot.width, y);
  context.stroke();
  context.setLineDash([]);
}

function mark(context, x, plot, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(x - 5, plot.top - 4);
  context.lineTo(x + 5, plot.top - 4);
  context.lineTo(x, plot.top + 5);
  context.fill();
}
