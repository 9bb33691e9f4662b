// The page's skeleton: controls, the drawings with their headings, the alerts.

import { make, makeChoice } from "./dom.js";

const KEYS = [
  ["\u2190 \u2191 \u2192 \u2193", "cell"],
  ["+ \u2212", "zoom"],
  ["0", "all steps"],
  ["n p", "next, previous alert"],
];

/** `act` holds what the controls do: `set(change)`, `zoomBy(factor)`, `zoomOut()`. */
export function makeLayout(act) {
  const run = makeChoice("Run", (value) => act.set({ run: value }));
  const compare = makeChoice("Compare with", (value) => act.set({ compare: value || null }));
  const mode = makeChoice("Two runs as", (value) => act.set({ mode: value }));
  const metric = makeChoice("Metric", (value) => act.set({ metric: value }));
  const scale = makeChoice("Colour scale", (value) => act.set({ scale: value }));
  metric.element.classList.add("metrics");
  const buttons = make(
    "div",
    { className: "buttons", role: "group", "aria-label": "Zoom" },
    button("+", "Zoom in", () => act.zoomBy(0.5)),
    button("\u2212", "Zoom out", () => act.zoomBy(2)),
    button("all steps", "Show all steps", () => act.zoomOut()),
  );
  const keys = make("p", { className: "keys soft" }, ...KEYS.flatMap(([key, does]) => [make("kbd", {}, key), ` ${does} `]), "drag to zoom");
  const side = make("div", { className: "side" }, run.element, compare.element, mode.element, metric.element, scale.element, buttons, keys);

  const message = make("p", { className: "message", role: "status", hidden: true });
  const title = make("h2", {});
  const meaning = make("p", { className: "meaning" });
  const kept = make("p", { className: "soft kept" });
  const bar = make("canvas", { className: "bar", role: "img" });
  const ends = [make("span", {}), make("span", {})];
  const barText = make("span", { className: "soft" });
  const colourBar = make("div", { className: "colours" }, ends[0], bar, ends[1], barText);
  const maps = make("div", { className: "maps" });
  const readout = make("p", { className: "readout", role: "status", "aria-live": "polite" });
  const heat = make("section", { className: "panel", "aria-label": "Layers over steps" }, title, meaning, kept, colourBar, maps, readout);
  const curve = drawing("curve", "The chosen layer over steps");
  const heads = drawing("heads", "Heads of the chosen layer over steps", make("div", { className: "maps" }));
  const profile = drawing("profile", "The chosen step over depth");
  const list = make("div", { className: "alerts", role: "list", "aria-label": "Alerts, newest first" });
  const count = make("h2", {}, "Alerts");
  const aside = make("section", { className: "aside", "aria-label": "Alerts" }, count, list);
  const main = make("div", { className: "main" }, heat, curve.element, heads.element, profile.element);
  const element = make("div", { className: "collapse" }, message, make("div", { className: "columns" }, side, main, aside));
  return {
    element,
    message,
    run,
    compare,
    mode,
    metric,
    scale,
    title,
    meaning,
    kept,
    bar,
    ends,
    barText,
    maps,
    readout,
    curve,
    heads,
    profile,
    list,
    count,
    main,
  };
}

function drawing(name, label, inside = null) {
  const title = make("h3", {});
  const caption = make("p", { className: "soft" });
  const body = inside || make("canvas", { className: "plain", role: "img", "aria-label": label, dataset: { name } });
  return { element: make("section", { className: `panel ${name}`, "aria-label": label }, title, caption, body), title, caption, body };
}

function button(text, label, click) {
  return make("button", { type: "button", "aria-label": label, onclick: click }, text);
}
