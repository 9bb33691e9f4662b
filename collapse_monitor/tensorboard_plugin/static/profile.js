// One step over the depth of the network: where along the layers a reading leaves its healthy range.

import { drawCountAxis, drawValueAxis, prepareCanvas, valueScale } from "./axes.js";

const HEIGHT = 190;

/** lines: [{ values, colour, dashed }], one value per layer each. */
export function drawProfile(canvas, { lines, layer, healthy, colours }) {
  const frame = prepareCanvas(canvas, HEIGHT);
  if (!frame || !lines.length) return;
  const { context, plot } = frame;
  const count = Math.max(...lines.map(({ values }) => values.length));
  const x = (row) => plot.left + (count > 1 ? row / (count - 1) : 0.5) * plot.width;
  const behind = healthy ? [...healthy.low, ...healthy.high] : [];
  const scale = valueScale(plot, [...lines.flatMap(({ values }) => values), ...behind]);
  if (healthy) drawHealthy(context, healthy, x, scale, colours);
  for (const line of [...lines].reverse()) drawLine(context, line, x, scale);
  const chosen = layer === null ? NaN : lines[0].values[layer];
  if (Number.isFinite(chosen)) {
    context.beginPath();
    context.arc(x(layer), scale.at(chosen), 6, 0, 2 * Math.PI);
    context.strokeStyle = colours.text;
    context.lineWidth = 2;
    context.stroke();
    context.lineWidth = 1;
  }
  drawCountAxis(frame, count, x, colours);
  drawValueAxis(frame, scale, colours);
}

function drawHealthy(context, healthy, x, scale, colours) {
  const rows = healthy.middle.flatMap((middle, row) => (Number.isFinite(middle) ? [row] : []));
  if (!rows.length) return;
  context.beginPath();
  for (const row of rows) context.lineTo(x(row), scale.at(healthy.high[row]));
  for (const row of [...rows].reverse()) context.lineTo(x(row), scale.at(healthy.low[row]));
  context.closePath();
  context.fillStyle = colours.healthy;
  context.fill();
  context.beginPath();
  for (const row of rows) context.lineTo(x(row), scale.at(healthy.middle[row]));
  context.strokeStyle = colours.soft;
  context.setLineDash([2, 3]);
  context.stroke();
  context.setLineDash([]);
}

function drawLine(context, { values, colour, dashed }, x, scale) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 2;
  context.setLineDash(dashed ? [5, 3] : []);
  context.beginPath();
  let drawn = false;
  values.forEach((value, row) => {
    if (!Number.isFinite(value)) drawn = false;
    else if (drawn) context.lineTo(x(row), scale.at(value));
    else {
      context.moveTo(x(row), scale.at(value));
      drawn = true;
    }
  });
  context.stroke();
  context.setLineDash([]);
  context.lineWidth = 1;
  values.forEach((value, row) => {
    if (Number.isFinite(value)) context.fillRect(x(row) - 2, scale.at(value) - 2, 4, 4);
  });
}
