// Alerts below the heat map, at their steps: one glance tells when. Severity is height and shape, not colour alone.

import { MARGIN, prepareCanvas } from "./axes.js";
import { make } from "./dom.js";

const HEIGHT = 40;
const REACH = 12;
const WIDTH = 10;

export class AlertLane {
  constructor(choose) {
    this.element = make("canvas", { className: "lane", role: "img", "aria-label": "Alerts over steps; the list beside names them" });
    this.alerts = [];
    this.element.addEventListener("click", (event) => {
      const at = event.clientX - this.element.getBoundingClientRect().left;
      const near = this.alerts.map((alert) => [Math.abs(this.xOf(alert.step) - at), alert]).sort((a, b) => a[0] - b[0])[0];
      if (near && near[0] <= REACH) choose(near[1]);
    });
  }

  draw(alerts, range, colours) {
    this.alerts = alerts.filter((alert) => alert.step >= range.from && alert.step <= range.to);
    this.range = range;
    const frame = prepareCanvas(this.element, HEIGHT);
    if (!frame) return;
    const { context, plot } = frame;
    this.plot = plot;
    const floor = HEIGHT - 10;
    context.fillStyle = colours.soft;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText("alerts", MARGIN.left - 6, floor - 6);
    context.fillStyle = colours.line;
    context.fillRect(plot.left, floor, plot.width, 1);
    this.taken = new Map();
    for (const severity of ["critical", "warning", "info"]) {
      for (const alert of this.alerts.filter((candidate) => candidate.severity === severity))
        this.drawAlert(context, alert, floor, colours);
    }
  }

  xOf(step) {
    return this.plot.left + ((step - this.range.from) / (this.range.to - this.range.from)) * this.plot.width;
  }

  drawAlert(context, alert, floor, colours) {
    // Alerts of one step stand side by side, the gravest at its step.
    const place = Math.round(this.xOf(alert.step));
    const x = place + WIDTH * (this.taken.get(place) || 0);
    this.taken.set(place, (this.taken.get(place) || 0) + 1);
    context.fillStyle = context.strokeStyle = colours[alert.severity] || colours.info;
    if (alert.state !== "firing") {
      context.strokeRect(x - 3, floor - 8, 6, 6); // over, or no data: hollow
    } else if (alert.severity === "critical") {
      context.fillRect(x - 3, floor - 26, 6, 26);
    } else {
      context.beginPath();
      context.moveTo(x - 6, floor);
      context.lineTo(x + 6, floor);
      context.lineTo(x, floor - (alert.severity === "warning" ? 17 : 9));
      context.fill();
    }
  }
}
