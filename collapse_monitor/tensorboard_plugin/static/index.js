// The tab in TensorBoard.

import { make } from "./dom.js";
import { keepFresh } from "./reload.js";
import { tensorboardSource } from "./source_tensorboard.js";
import { hostPlace } from "./state.js";
import { followTheme } from "./theme.js";
import { View } from "./view.js";

export async function render() {
  const style = make("link", { rel: "stylesheet", href: "static/style.css" });
  const styled = new Promise((done) => {
    style.addEventListener("load", done);
    style.addEventListener("error", done);
  });
  document.head.append(style);
  document.documentElement.lang = "en";
  document.title = "Collapse";
  await styled;
  const view = new View(tensorboardSource(), hostPlace("collapse_monitor"));
  document.body.append(view.element);
  followTheme(() => view.draw());
  await view.refresh();
  keepFresh(() => view.refresh());
}
