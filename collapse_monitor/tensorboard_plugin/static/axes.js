// The frame of every drawing: sharp canvases, ticks at round numbers, labels that stay inside.

import { spell, spellStep } from "./numbers.js";

export const MARGIN = { left: 52, right: 14, top: 8, bottom: 24 };

/** Size a canvas for its box and the screen; null while it is not shown. */
export function prepareCanvas(canvas, height) {
  const width = canvas.clientWidth;
  if (!width) return null;
  const ratio = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  const plot = {
    left: MARGIN.left,
    top: MARGIN.top,
    width: width - MARGIN.left - MARGIN.right,
    height: height - MARGIN.top - MARGIN.bottom,
  };
  return { context, ratio, plot };
}

/** Round numbers within a range, about so many. */
export function roundTicks(low, high, about) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / unit); tick * unit <= high; tick++) ticks.push(tick * unit);
  return ticks;
}

export function drawStepAxis({ context, plot }, range, colours) {
  context.fillStyle = colours.soft;
  context.strokeStyle = colours.line;
  context.textBaseline = "top";
  for (const step of roundTicks(range.from, range.to, Math.max(2, plot.width / 110))) {
    if (step !== Math.round(step)) continue;
    const x = plot.left + ((step - range.from) / (range.to - range.from)) * plot.width;
    tick(context, x, plot.top + plot.height, spellStep(step), plot);
  }
}

/** Numbers of layers or heads below a drawing over depth. */
export function drawCountAxis({ context, plot }, count, at, colours) {
  context.fillStyle = colours.soft;
  context.strokeStyle = colours.line;
  context.textBaseline = "top";
  for (const index of roundTicks(0, count - 1, Math.min(count, plot.width / 50))) {
    if (index === Math.round(index)) tick(context, at(index), plot.top + plot.height, String(index), plot);
  }
}

export function drawValueAxis({ context, plot }, scale, colours) {
  context.fillStyle = colours.soft;
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const value of scale.ticks) context.fillText(spell(value), plot.left - 6, scale.at(value), plot.left - 8);
}

/** A vertical axis that holds all values, logarithmic where they span orders of magnitude. */
export function valueScale(plot, values) {
  const finite = values.filter(Number.isFinite);
  let low = finite.length ? Math.min(...finite) : 0;
  let high = finite.length ? Math.max(...finite) : 1;
  const logarithmic = low > 0 && high / low > 50;
  const of = logarithmic ? Math.log10 : (value) => value;
  if (high <= low) [low, high] = [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  const pad = (of(high) - of(low)) * 0.04;
  const start = of(low) - pad;
  const span = of(high) + pad - start;
  const ticks = logarithmic ? roundTicks(start, start + span, 4).map((power) => 10 ** power) : roundTicks(start, start + span, 4);
  const at = (value) => plot.top + plot.height * (1 - (of(logarithmic ? Math.max(value, 1e-300) : value) - start) / span);
  return { at, ticks, logarithmic };
}

function tick(context, x, y, text, plot) {
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x, y + 4);
  context.stroke();
  const half = context.measureText(text).width / 2;
  context.textAlign = "left";
  context.fillText(text, Math.min(x - half, plot.left + plot.width + MARGIN.right - 2 * half), y + 6);
}
