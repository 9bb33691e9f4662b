// The whole view: what is chosen, what is loaded for it, and who draws what. The same in TensorBoard and in the report.

import { listAlerts, sayAlert } from "./alerts.js";
import { NO_DATA, sayBounds, sayCell, sayHealthy, sayKept, sayMetric, sayNewer } from "./captions.js";
import { describeEnds, describeScale, differenceScale, drawColourBar, orderedScale } from "./colours.js";
import { differenceOf } from "./compare.js";
import { drawCurve } from "./curve.js";
import { fillChoice } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { listenToKeys } from "./keyboard.js";
import { AlertLane } from "./lane.js";
import { makeLayout } from "./layout.js";
import { clamp, spellSteps } from "./numbers.js";
import { drawProfile } from "./profile.js";
import { boundsOf, columnOf, extentOf, healthyOf, middlesOf, valueAt, worseOf } from "./series.js";
import { themeColours } from "./theme.js";

const FIRST_METRIC = "token_similarity";
const WIDE = "(min-width: 760px)";

export class View {
  /** `source` gives the readings, `place` keeps what is chosen. */
  constructor(source, place) {
    this.source = source;
    this.place = place;
    this.state = { run: null, compare: null, mode: "side", metric: null, scale: "most", step: null, layer: null, from: null, to: null, ...place.read() };
    this.layout = makeLayout({ set: (change) => this.set(change), zoomBy: (factor) => this.zoomBy(factor), zoomOut: () => this.zoom(null, null) });
    this.element = this.layout.element;
    this.maps = [this.makeMap("first"), this.makeMap("second")];
    this.lane = new AlertLane((alert) => this.showAlert(alert));
    this.headMap = new Heatmap({
      name: "heads", label: "Heads of the chosen layer over steps",
      tell: (step, row) => this.tellHead(step, row), choose: (step) => this.choose(step, this.state.layer), zoom: (from, to) => this.zoom(from, to),
    });
    this.layout.maps.append(this.maps[0].element, this.maps[1].element, this.lane.element);
    this.layout.heads.body.append(this.headMap.element);
    this.loads = 0;
    this.data = null;
    place.onChange(() => this.follow());
    new ResizeObserver(() => this.draw()).observe(this.layout.main);
    window.matchMedia(WIDE).addEventListener("change", () => this.fillControls());
  }

  /** Load all there is to know and what is chosen; also when there may be more of it. */
  async refresh() {
    await this.attempt(async () => {
      this.index = await this.source.index();
      await this.load();
    });
  }

  set(change) {
    Object.assign(this.state, change);
    this.place.write(this.state);
    const reload = Object.keys(change).some((name) => ["run", "compare", "metric"].includes(name)) || (this.isBinned() && ("from" in change || "to" in change));
    if (reload) return this.attempt(() => this.load());
    this.draw();
    return "layer" in change ? this.attempt(() => this.loadHeads()) : null;
  }

  /** Somebody changed the URL. */
  follow() {
    const found = this.place.read();
    const change = Object.fromEntries(Object.entries(found).filter(([name, value]) => this.state[name] !== value));
    if (Object.keys(change).length) this.set(change);
  }

  async attempt(work) {
    try {
      await work();
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    this.layout.message.textContent = text;
    this.layout.message.hidden = !text;
  }

  async load() {
    const load = ++this.loads;
    const { runs } = this.index;
    if (!runs.length) return this.say(NO_DATA);
    const { state } = this;
    const run = runs.find(({ name }) => name === state.run) || runs[0];
    state.run = run.name;
    const alerts = run.newer ? [] : await this.source.alerts(run.name);
    if (load !== this.loads) return null;
    state.metric = chooseMetric(run, state.metric, alerts);
    const other = runs.find(({ name }) => name === state.compare && name !== run.name && state.metric in runs.find((found) => found.name === name).metrics);
    if (run.newer || !state.metric) {
      this.fillControls();
      return this.say(run.newer ? sayNewer(run, this.index.version) : NO_DATA);
    }
    const names = other ? [run.name, other.name] : [run.name];
    const [series, otherAlerts] = await Promise.all([
      Promise.all(names.map((name) => this.source.series(name, state.metric, state.from, state.to))),
      other ? this.source.alerts(other.name) : [],
    ]);
    if (load !== this.loads) return null;
    performance.mark("collapse-arrived");
    series.forEach((one) => prepare(one));
    const whole = this.isSame(names) && this.isZoomed() ? this.data.whole : unite(series.map(extentOf));
    this.data = { names, run, other, metric: state.metric, about: run.metrics[state.metric], series, alerts: [alerts, otherAlerts], whole, heads: null };
    this.data.healthy = this.healthyRange();
    if (state.step === null && state.layer === null) Object.assign(state, firstLook(series[0], this.data.about, alerts));
    this.data.difference = other ? prepare(differenceOf(series[0], series[1])) : null;
    this.say(state.compare && !other && state.compare !== run.name ? `Run ${state.compare} has no ${sayMetric(state.metric)} to compare with.` : "");
    this.fillControls();
    this.draw();
    this.layout.readout.textContent = state.layer === null || state.step === null ? "" : this.tell(0, state.step, state.layer);
    performance.measure("collapse-paint", "collapse-arrived");
    this.element.dataset.painted = String(Number(this.element.dataset.painted || 0) + 1);
    return this.loadHeads();
  }

  async loadHeads() {
    const { data, state } = this;
    if (!data) return;
    const wanted = data.about.heads && state.layer !== null;
    const found = wanted ? await this.source.heads(data.names[0], data.metric, state.layer) : null;
    if (data !== this.data || state.layer !== this.state.layer) return;
    // Heads are logged now and then: a reading stands until the next one.
    data.heads = found && prepare(found, found.columns === 1 && data.whole ? data.whole.to - found.last[0] : 0);
    this.drawHeads();
  }

  /** Of the run itself, else of the one it is compared with. */
  healthyRange() {
    const { names, series, alerts } = this.data;
    const own = healthyOf(series[0], alerts[0]);
    const other = !own && series.length > 1 && series[1].rows === series[0].rows ? healthyOf(series[1], alerts[1]) : null;
    return own || (other && { ...other, of: names[1] });
  }

  isSame(names) {
    return this.data && this.data.metric === this.state.metric && String(this.data.names) === String(names);
  }

  isZoomed() {
    return this.state.from !== null || this.state.to !== null;
  }

  isBinned() {
    return Boolean(this.data) && this.data.series.some((series) => series.columns < series.kept || (this.isZoomed() && series.kept < 1));
  }

  range() {
    const whole = this.data.whole || { from: 0, to: 1 };
    const from = clamp(this.state.from ?? whole.from, whole.from, whole.to);
    const to = clamp(this.state.to ?? whole.to, whole.from, whole.to);
    return to > from ? { from, to } : whole;
  }

  zoom(from, to) {
    this.set({ from: from === null ? null : Math.round(from), to: to === null ? null : Math.max(Math.round(to), Math.round(from) + 1) });
  }

  zoomBy(factor) {
    if (!this.data || !this.data.whole) return;
    const { from, to } = this.range();
    const { whole } = this.data;
    const size = (to - from) * factor;
    if (size >= whole.to - whole.from) return this.zoom(null, null);
    const middle = this.state.step !== null && this.state.step >= from && this.state.step <= to ? this.state.step : (from + to) / 2;
    const start = clamp(middle - size / 2, whole.from, whole.to - size);
    return this.zoom(start, start + Math.max(size, 2));
  }

  choose(step, row) {
    const { from, to } = this.range();
    const change = { step, layer: row };
    // The chosen step stays in sight.
    if (step < from || step > to) Object.assign(change, { from: Math.round(step - (to - from) / 2), to: Math.round(step + (to - from) / 2) });
    this.set(change);
    if (row !== null) this.layout.readout.textContent = this.tell(0, step, row);
  }

  showAlert(alert) {
    const change = { step: alert.step, layer: alert.layers.length ? alert.layers[0] : this.state.layer };
    if (this.data.run.metrics[alert.metric]?.layers) change.metric = alert.metric;
    const { from, to } = this.range();
    if (alert.step < from || alert.step > to) Object.assign(change, { from: null, to: null });
    this.set(change);
    this.layout.readout.textContent = sayAlert(alert);
  }

  nextAlert(direction) {
    const alerts = this.data ? this.data.alerts[0] : [];
    if (!alerts.length) return void (this.layout.readout.textContent = "No alert in this run.");
    const at = this.shownAlert === undefined || !alerts[this.shownAlert] ? (direction > 0 ? -1 : alerts.length) : this.shownAlert;
    this.shownAlert = (at + direction + alerts.length) % alerts.length;
    return this.showAlert(alerts[this.shownAlert]);
  }

  makeMap(which) {
    const number = which === "first" ? 0 : 1;
    const map = new Heatmap({
      name: which, label: "Readings by layer and step. Arrow keys choose a cell, plus and minus zoom, n goes to the next alert.",
      tell: (step, row) => this.tell(number, step, row), choose: (step, row) => this.choose(step, row), zoom: (from, to) => this.zoom(from, to),
      hover: (step) => this.maps.forEach((other) => other !== map && other.point(step)),
    });
    listenToKeys(map.front, () => ({ series: this.data && this.shown(number), step: this.state.step, row: this.state.layer }), {
      choose: (step, row) => this.choose(step, row), zoomBy: (factor) => this.zoomBy(factor), zoomOut: () => this.zoom(null, null), nextAlert: (direction) => this.nextAlert(direction),
    });
    return map;
  }

  /** What a heat map shows: a run, or the difference of two. */
  shown(number) {
    return this.isDifference() ? this.data.difference : this.data.series[number];
  }

  isDifference() {
    return Boolean(this.data && this.data.other && this.state.mode === "difference");
  }

  tell(number, step, row) {
    const { data } = this;
    if (this.isDifference()) return sayCell(data.difference, `difference of ${sayMetric(data.metric)}`, data.run.layers, null, step, row);
    const run = number ? data.other : data.run;
    const who = data.other ? `${run.name}, ` : "";
    return who + sayCell(data.series[number], sayMetric(data.metric), run.layers, number ? null : data.healthy, step, row);
  }

  tellHead(step, row) {
    const { heads, metric } = this.data;
    return sayCell(heads, sayMetric(metric), heads.labels, null, step, row).replace(`layer ${row} `, "");
  }

  fillControls() {
    const { layout, state, index } = this;
    const runs = index.runs.map(({ name }) => [name, name]);
    const run = index.runs.find(({ name }) => name === state.run);
    const metrics = run ? Object.keys(run.metrics).filter((metric) => run.metrics[metric].layers).sort() : [];
    fillChoice(layout.run.select, runs, state.run);
    fillChoice(layout.compare.select, [["", "no other run"], ...runs.filter(([name]) => name !== state.run)], this.data && this.data.other ? state.compare : "");
    fillChoice(layout.mode.select, [["side", "both maps"], ["difference", "their difference"]], state.mode);
    fillChoice(layout.metric.select, metrics.map((metric) => [metric, metric.replaceAll("_", " ")]), state.metric);
    fillChoice(layout.scale.select, [["most", "1\u201399 % of values"], ["whole", "smallest to largest"]], state.scale);
    layout.metric.select.size = window.matchMedia(WIDE).matches ? clamp(metrics.length, 2, 14) : 1;
    layout.compare.element.hidden = runs.length < 2;
    layout.mode.element.hidden = !(this.data && this.data.other);
    this.fillAlerts();
  }

  fillAlerts() {
    const alerts = this.data ? this.data.alerts[0] : [];
    const { list, count } = this.layout;
    count.textContent = `Alerts (${alerts.length})`;
    const content = JSON.stringify([this.state.run, alerts]);
    if (content === this.listed) return; // an entry that is open stays open
    this.listed = content;
    this.shownAlert = undefined;
    list.replaceChildren(...listAlerts(alerts, (alert) => this.showAlert(alert)));
  }

  draw() {
    const { data, layout, state } = this;
    if (!data) return;
    this.colours = themeColours();
    const difference = this.isDifference();
    const shown = difference ? [data.difference] : data.series;
    this.scale = difference ? differenceScale(data.difference, data.about) : orderedScale(data.series, data.about, state.scale === "whole");
    const range = this.range();
    layout.title.textContent = `${sayMetric(data.metric, data.about)} \u00b7 layer \u00d7 step${difference ? `: ${data.names.join(" minus ")}` : ""}`;
    layout.kept.textContent = difference ? `${data.difference.kept} steps that both runs kept` : data.names.map((name, number) => `${data.other ? `${name}: ` : ""}${sayKept(data.series[number], this.index.limit)}`).join(" \u00b7 ");
    this.drawColours();
    const height = heightOf(Math.max(...shown.map(({ rows }) => rows)), shown.length > 1 ? 300 : 440);
    this.maps.forEach((map, number) => {
      map.element.hidden = number >= shown.length;
      if (number >= shown.length) return;
      const marks = (data.alerts[number] || []).filter(({ state: now, layers }) => now === "firing" && layers.length).map(({ step, layers, severity }) => ({ step, row: layers[0], severity }));
      map.element.dataset.run = data.other && !difference ? data.names[number] : "";
      map.draw({ series: shown[number], scale: this.scale, range, middles: shown[number].middles, marks: difference ? [] : marks, selection: { step: state.step, row: state.layer }, colours: this.colours, height });
    });
    this.lane.draw(data.alerts[0], range, this.colours);
    this.drawLayer(range);
    this.drawHeads();
    this.drawStep();
  }

  drawColours() {
    const { bar, ends, barText } = this.layout;
    drawColourBar(bar, this.scale);
    describeEnds(this.scale, this.data.names).forEach((text, end) => (ends[end].textContent = text));
    barText.textContent = describeScale(this.scale);
    bar.setAttribute("aria-label", `Colour scale from ${ends[0].textContent} to ${ends[1].textContent}: ${barText.textContent}`);
  }

  /** The lines of the drawings below: the run, and the one it is compared with. */
  lines(make) {
    return this.data.series.map((series, number) => ({ ...make(series), colour: number ? this.colours.second : this.colours.accent, dashed: number > 0 }));
  }

  drawLayer(range) {
    const { data, state } = this;
    const { title, caption, body, element } = this.layout.curve;
    element.hidden = state.layer === null || state.layer >= data.series[0].rows;
    if (element.hidden) return;
    const bounds = boundsOf(data.alerts[0], data.metric, state.layer);
    const alerts = data.alerts[0].filter(({ metric, layers }) => metric === data.metric && layers.includes(state.layer));
    title.textContent = `Layer ${state.layer} \u00b7 ${data.run.layers[state.layer] || ""}`;
    caption.textContent = `${data.other ? `solid ${data.names[0]}, dashed ${data.names[1]}; ` : ""}other layers grey; ${sayHealthy(data.healthy, data.alerts[0])}${sayBounds(bounds)}`;
    drawCurve(body, { lines: this.lines((series) => ({ series })), layer: state.layer, range, step: state.step, healthy: data.healthy, bounds, alerts, colours: this.colours });
  }

  drawHeads() {
    const { data, state } = this;
    const { title, caption, element } = this.layout.heads;
    const heads = data ? data.heads : null;
    element.hidden = !heads || !heads.rows || state.layer === null;
    if (element.hidden) return;
    const scale = orderedScale([heads], data.about, state.scale === "whole");
    title.textContent = `Heads of layer ${state.layer} \u00b7 head \u00d7 step`;
    caption.textContent = `${sayKept(heads)}; colour ${describeScale(scale)}`;
    this.headMap.draw({ series: heads, scale, range: this.range(), middles: heads.middles, marks: [], selection: { step: state.step, row: null }, colours: this.colours, height: heightOf(heads.rows, 280) });
  }

  drawStep() {
    const { data, state } = this;
    const { title, caption, body, element } = this.layout.profile;
    element.hidden = state.step === null || !data.series[0].columns;
    if (element.hidden) return;
    const profile = (series) => ({ values: Array.from({ length: series.rows }, (_, row) => valueAt(series, columnOf(series, state.step), row)) });
    const column = columnOf(data.series[0], state.step);
    title.textContent = `Depth profile at ${spellSteps(data.series[0].first[column], data.series[0].last[column])}`;
    caption.textContent = `${data.other ? `solid ${data.names[0]}, dashed ${data.names[1]}; ` : ""}layers from first to last; ${sayHealthy(data.healthy, data.alerts[0])}`;
    drawProfile(body, { lines: this.lines(profile), layer: state.layer, healthy: data.healthy, colours: this.colours });
  }
}

function chooseMetric(run, wanted, alerts) {
  const has = (metric) => Boolean(run.metrics[metric]?.layers);
  if (wanted && has(wanted)) return wanted;
  const alerted = alerts.find(({ severity, metric }) => severity === "critical" && has(metric));
  if (alerted) return alerted.metric;
  return has(FIRST_METRIC) ? FIRST_METRIC : Object.keys(run.metrics).filter(has).sort()[0] || null;
}

/** Where to look first: at the first critical alert, else at the newest readings of the layer nearest to collapse. */
function firstLook(series, about, alerts) {
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

/** What the drawings need to know of a series: how wide its last column is, and the middle of each row. */
function prepare(series, tail = 0) {
  const extent = extentOf(series);
  series.tail = Math.max(tail, extent ? extent.to - series.last[series.columns - 1] : 1);
  series.middles = middlesOf(series);
  return series;
}

function heightOf(rows, most) {
  return clamp(36 + 24 * rows, 120, most);
}

function unite(extents) {
  const known = extents.filter(Boolean);
  return known.length ? { from: Math.min(...known.map(({ from }) => from)), to: Math.max(...known.map(({ to }) => to)) } : null;
}
