// Rows by steps in colour: hover for a value, click to choose a cell, drag to zoom.

import { drawStepAxis, prepareCanvas, roundTicks } from "./axes.js";
import { make } from "./dom.js";
import { clamp } from "./numbers.js";
import { rasterise } from "./raster.js";
import { columnOf } from "./series.js";

const SHORTEST_DRAG = 6;

export class Heatmap {
  /** `tell(step, row)` gives the text of the read-out; `choose(step, row)`, `zoom(from, to)` and `hover(step or null)` are told. */
  constructor({ name, label, tell, choose, zoom, hover = () => {} }) {
    this.picture = make("canvas", { className: "picture", "aria-hidden": "true" });
    this.front = make("canvas", { className: "front", tabIndex: 0, "aria-label": label, dataset: { name } });
    // The arrow keys belong to the drawing, so that a screen reader passes them on.
    this.front.setAttribute("role", "application");
    this.front.setAttribute("aria-roledescription", "heat map");
    this.tip = make("div", { className: "tip", hidden: true, "aria-hidden": "true" });
    this.element = make("div", { className: "heatmap" }, this.picture, this.front, this.tip);
    this.calls = { tell, choose, zoom, hover };
    this.content = null;
    this.cursor = null;
    this.drag = null;
    this.front.addEventListener("pointermove", (event) => this.move(event));
    this.front.addEventListener("pointerleave", () => this.leave());
    this.front.addEventListener("pointerdown", (event) => this.press(event));
    this.front.addEventListener("pointerup", (event) => this.release(event));
    this.front.addEventListener("dblclick", () => this.calls.zoom(null, null));
  }

  /** content: { series, scale, range, middles, marks: [{ step, row, severity }], selection: { step, row }, colours, height } */
  draw(content) {
    this.content = content;
    const frame = prepareCanvas(this.picture, content.height);
    if (!frame) return;
    const { context, ratio, plot } = frame;
    this.plot = plot;
    this.hatch(context, content.colours);
    const picture = rasterise(content.series, content.scale, content.range, Math.round(plot.width * ratio), content.middles);
    context.imageSmoothingEnabled = false;
    context.drawImage(picture, plot.left, plot.top, plot.width, plot.height);
    drawStepAxis(frame, content.range, content.colours);
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const row of roundTicks(0, content.series.rows - 1, Math.min(content.series.rows, plot.height / 28))) {
      if (row === Math.round(row)) context.fillText(String(row), plot.left - 6, this.yOf(row));
    }
    for (const mark of content.marks) this.drawMark(context, mark, content.colours);
    this.drawFront();
  }

  xOf(step) {
    const { from, to } = this.content.range;
    return this.plot.left + ((step - from) / (to - from)) * this.plot.width;
  }

  yOf(row) {
    return this.plot.top + this.plot.height * (1 - (row + 0.5) / this.content.series.rows);
  }

  /** The cell under a pointer: the step its column begins at, and its row. Null beside the drawing. */
  cellAt(event) {
    const { series, range } = this.content;
    const box = this.front.getBoundingClientRect();
    const x = (event.clientX - box.left - this.plot.left) / this.plot.width;
    const y = (event.clientY - box.top - this.plot.top) / this.plot.height;
    if (x < 0 || x > 1 || y < 0 || y > 1 || !series.columns) return null;
    const row = clamp(Math.floor((1 - y) * series.rows), 0, series.rows - 1);
    return {
      at: range.from + x * (range.to - range.from),
      step: series.first[columnOf(series, range.from + x * (range.to - range.from))],
      row,
      x,
      y,
    };
  }

  /** Show where another drawing of the same steps is pointed at. */
  point(step) {
    this.cursor = step;
    if (this.content && this.plot) this.drawFront();
  }

  move(event) {
    const cell = this.content && this.plot ? this.cellAt(event) : null;
    if (this.drag)
      this.drag.end = clamp(event.clientX - this.front.getBoundingClientRect().left, this.plot.left, this.plot.left + this.plot.width);
    this.tip.hidden = !cell;
    if (cell) {
      this.tip.textContent = this.calls.tell(cell.step, cell.row);
      this.tip.style.left = `${cell.x > 0.6 ? this.plot.left + cell.x * this.plot.width - 12 - this.tip.offsetWidth : this.plot.left + cell.x * this.plot.width + 12}px`;
      this.tip.style.top = `${this.plot.top + cell.y * this.plot.height + (cell.y > 0.6 ? -this.tip.offsetHeight - 10 : 14)}px`;
    }
    this.calls.hover(cell ? cell.at : null);
  }

  leave() {
    this.tip.hidden = true;
    this.calls.hover(null);
  }

  press(event) {
    if (event.button !== 0 || !this.content || !this.cellAt(event)) return;
    const x = event.clientX - this.front.getBoundingClientRect().left;
    this.drag = { start: x, end: x };
    this.front.setPointerCapture(event.pointerId);
  }

  release(event) {
    if (!this.drag) return;
    const [low, high] = [Math.min(this.drag.start, this.drag.end), Math.max(this.drag.start, this.drag.end)];
    this.drag = null;
    const { from, to } = this.content.range;
    const stepAt = (x) => from + ((x - this.plot.left) / this.plot.width) * (to - from);
    if (high - low >= SHORTEST_DRAG) this.calls.zoom(stepAt(low), stepAt(high));
    else {
      const cell = this.cellAt(event);
      if (cell) this.calls.choose(cell.step, cell.row);
    }
    this.drawFront();
  }

  // What was not read is hatched, so that it is no colour of the map.
  hatch(context, colours) {
    const { plot } = this;
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.width, plot.height);
    context.clip();
    context.strokeStyle = colours.line;
    context.beginPath();
    for (let x = plot.left - plot.height; x < plot.left + plot.width; x += 7) {
      context.moveTo(x, plot.top + plot.height);
      context.lineTo(x + plot.height, plot.top);
    }
    context.stroke();
    context.restore();
  }

  drawMark(context, { step, row, severity }, colours) {
    const { from, to } = this.content.range;
    if (step < from || step > to || row >= this.content.series.rows) return;
    context.beginPath();
    context.arc(this.xOf(step), this.yOf(row), 4, 0, 2 * Math.PI);
    context.fillStyle = colours[severity] || colours.info;
    context.fill();
    context.lineWidth = 1.5;
    context.strokeStyle = "#fff";
    context.stroke();
    context.lineWidth = 1;
  }

  drawFront() {
    const frame = prepareCanvas(this.front, this.content.height);
    if (!frame) return;
    const { context, plot } = frame;
    const { selection, series, range } = this.content;
    const outline = (x, y, width, height) => {
      for (const [colour, size] of [
        ["#000", 3],
        ["#fff", 1],
      ]) {
        context.strokeStyle = colour;
        context.lineWidth = size;
        context.strokeRect(x, y, width, height);
      }
    };
    context.save();
    context.beginPath();
    context.rect(plot.left - 2, plot.top - 2, plot.width + 4, plot.height + 4);
    context.clip();
    if (selection && selection.row !== null && selection.row < series.rows && series.columns) {
      const high = plot.height / series.rows;
      const top = this.yOf(selection.row) - high / 2;
      outline(plot.left, top, plot.width, high);
      if (selection.step !== null) {
        const column = columnOf(series, selection.step);
        const end = column + 1 < series.columns ? series.first[column + 1] : series.last[column] + (series.tail || 1);
        const x = this.xOf(series.first[column]);
        outline(x, top, Math.max(3, this.xOf(end) - x), high);
      }
    }
    if (this.cursor !== null && this.cursor >= range.from && this.cursor <= range.to)
      outline(this.xOf(this.cursor), plot.top, 0, plot.height);
    if (this.drag) {
      context.fillStyle = "rgba(255, 255, 255, 0.35)";
      context.fillRect(Math.min(this.drag.start, this.drag.end), plot.top, Math.abs(this.drag.end - this.drag.start), plot.height);
    }
    context.restore();
  }
}
