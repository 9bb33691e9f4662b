// The whole view: what is chosen, what is loaded for it, and who draws what. The same in TensorBoard and in the report.

import { sayAlert } from "./alerts.js";
import { NO_DATA, sayCell, sayKept, sayLayer, sayMetric, sayNewer } from "./captions.js";
import { differenceScale, orderedScale } from "./colours.js";
import { differenceOf } from "./compare.js";
import { WIDE, fillControls } from "./fill.js";
import { chooseMetric, firstLook } from "./first.js";
import { AlertLane } from "./lane.js";
import { makeLayout } from "./layout.js";
import { drawMaps, makeHeadMap, makeLayerMap } from "./maps.js";
import { clamp } from "./numbers.js";
import { drawColours, drawHeads, drawLayer, drawStep } from "./panels.js";
import { extentOf, healthyOf, prepare, unite } from "./series.js";
import { themeColours } from "./theme.js";

export class View {
  /** `source` gives the readings, `place` keeps what is chosen. */
  constructor(source, place) {
    this.source = source;
    this.place = place;
    this.state = {
      run: null,
      compare: null,
      mode: "side",
      metric: null,
      scale: "most",
      step: null,
      layer: null,
      from: null,
      to: null,
      ...place.read(),
    };
    this.layout = makeLayout({
      set: (change) => this.set(change),
      zoomBy: (factor) => this.zoomBy(factor),
      zoomOut: () => this.zoom(null, null),
    });
    this.element = this.layout.element;
    this.maps = [makeLayerMap(this, 0), makeLayerMap(this, 1)];
    this.headMap = makeHeadMap(this);
    this.head = null;
    this.lane = new AlertLane((alert) => this.showAlert(alert));
    this.layout.maps.append(this.maps[0].element, this.maps[1].element, this.lane.element);
    this.layout.heads.body.append(this.headMap.element);
    this.loads = 0;
    this.data = null;
    place.onChange(() => this.follow());
    new ResizeObserver(() => this.resize()).observe(this.layout.main);
    window.matchMedia(WIDE).addEventListener("change", () => fillControls(this));
  }

  /** Load all there is to know and what is chosen; also when there may be more of it. */
  async refresh() {
    await this.attempt(async () => {
      this.index = await this.source.index();
      await this.load({ quiet: true });
    });
  }

  set(change) {
    Object.assign(this.state, change);
    this.place.write(this.state);
    const reload =
      Object.keys(change).some((name) => ["run", "compare", "metric"].includes(name)) ||
      (this.data?.binned && ("from" in change || "to" in change));
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

  async load({ quiet = false } = {}) {
    const load = ++this.loads;
    const { runs } = this.index;
    if (!runs.length) return this.say(NO_DATA);
    const { state } = this;
    const run = runs.find(({ name }) => name === state.run) || runs[0];
    state.run = run.name;
    const alerts = run.newer ? [] : await this.source.alerts(run.name);
    if (load !== this.loads) return null;
    state.metric = chooseMetric(run, state.metric, alerts);
    const other = runs.find(
      ({ name }) => name === state.compare && name !== run.name && state.metric in runs.find((found) => found.name === name).metrics,
    );
    this.layout.main.hidden = Boolean(run.newer || !state.metric);
    if (this.layout.main.hidden) {
      this.data = null;
      fillControls(this);
      return this.say(run.newer ? sayNewer(run, this.index.version) : NO_DATA);
    }
    const names = other ? [run.name, other.name] : [run.name];
    const fetchAll = (from, to) => Promise.all(names.map((name) => this.source.series(name, state.metric, from, to)));
    const [full, otherAlerts] = await Promise.all([fetchAll(null, null), other ? this.source.alerts(other.name) : []]);
    const binned = full.some((one) => one.columns < one.kept);
    // Where several steps share a column, a closer look has more to show.
    const series = binned && this.isZoomed() ? await fetchAll(state.from, state.to) : full;
    if (load !== this.loads) return null;
    performance.mark("collapse-arrived");
    [...full, ...series].forEach((one) => prepare(one));
    const whole = unite(full.map(extentOf));
    this.data = {
      names,
      run,
      other,
      metric: state.metric,
      about: run.metrics[state.metric],
      full,
      series,
      binned,
      alerts: [alerts, otherAlerts],
      whole,
      heads: null,
    };
    this.data.healthy = this.healthyRange();
    if (!(Number.isInteger(state.layer) && state.layer >= 0 && state.layer < series[0].rows)) state.layer = null; // chosen in a deeper run
    if (state.step === null && state.layer === null) Object.assign(state, firstLook(series[0], this.data.about, alerts));
    this.data.difference = other ? prepare(differenceOf(series[0], series[1])) : null;
    this.say(
      state.compare && !other && state.compare !== run.name
        ? `Run ${state.compare} has no ${sayMetric(state.metric)} to compare with.`
        : "",
    );
    fillControls(this);
    this.draw();
    // New readings of a running training are no reason to interrupt a listener.
    if (!quiet || !this.layout.readout.textContent)
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
    drawHeads(this);
  }

  /** Of the run itself, else of the one it is compared with. */
  healthyRange() {
    const { names, full, alerts } = this.data;
    const own = healthyOf(full[0], alerts[0]);
    const other = !own && full.length > 1 && full[1].rows === full[0].rows ? healthyOf(full[1], alerts[1]) : null;
    return own || (other && { ...other, of: names[1] });
  }

  isZoomed() {
    return this.state.from !== null || this.state.to !== null;
  }

  range() {
    const whole = this.data.whole || { from: 0, to: 1 };
    const from = clamp(this.state.from ?? whole.from, whole.from, whole.to);
    const to = clamp(this.state.to ?? whole.to, whole.from, whole.to);
    return to > from ? { from, to } : whole;
  }

  // Drawings follow the width; their own heights are no reason to draw again.
  resize() {
    const width = this.layout.main.clientWidth;
    if (width === this.width) return;
    this.width = width;
    this.draw();
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
    if (step < from || step > to)
      Object.assign(change, { from: Math.round(step - (to - from) / 2), to: Math.round(step + (to - from) / 2) });
    this.set(change);
    if (row !== null) this.layout.readout.textContent = this.tell(0, step, row);
  }

  showAlert(alert) {
    const change = { step: alert.step, layer: alert.layers.length ? alert.layers[0] : this.state.layer };
    if (this.data.run.metrics[alert.metric]?.layers) change.metric = alert.metric;
    const { from, to } = this.range();
    if (alert.step < from || alert.step > to) Object.assign(change, { from: null, to: null });
    // What was loaded for it is said first, the alert last.
    Promise.resolve(this.set(change)).then(() => (this.layout.readout.textContent = sayAlert(alert)));
  }

  nextAlert(direction) {
    const alerts = this.data ? this.data.alerts[0] : [];
    if (!alerts.length) return void (this.layout.readout.textContent = "No alert in this run.");
    const at = this.shownAlert === undefined || !alerts[this.shownAlert] ? (direction > 0 ? -1 : alerts.length) : this.shownAlert;
    this.shownAlert = (at + direction + alerts.length) % alerts.length;
    return this.showAlert(alerts[this.shownAlert]);
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
    if (this.isDifference())
      return sayCell(data.difference, `difference of ${sayMetric(data.metric)}`, sayLayer(data.run.layers), null, step, row);
    const run = number ? data.other : data.run;
    const who = data.other ? `${run.name}, ` : "";
    return who + sayCell(data.series[number], sayMetric(data.metric), sayLayer(run.layers), number ? null : data.healthy, step, row);
  }

  tellHead(step, row) {
    const { heads, metric } = this.data;
    return sayCell(heads, sayMetric(metric), (head) => heads.labels[head] || `head ${head}`, null, step, row);
  }

  chooseHead(step, row) {
    this.head = row;
    this.choose(step, this.state.layer);
    this.layout.readout.textContent = this.tellHead(step, row);
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
    layout.meaning.textContent = data.about.meaning || "";
    layout.kept.textContent = difference
      ? `${data.difference.kept} steps that both runs kept`
      : data.names
          .map((name, number) => `${data.other ? `${name}: ` : ""}${sayKept(data.series[number], this.index.limit)}`)
          .join(" \u00b7 ");
    drawColours(this);
    drawMaps(this, shown, range);
    this.lane.draw(data.alerts[0], range, this.colours);
    drawLayer(this, range);
    drawHeads(this);
    drawStep(this);
  }
}
