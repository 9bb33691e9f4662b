// The report: the same view over the readings that the page carries.

import { embeddedSource } from "./source_embedded.js";
import { ownPlace } from "./state.js";
import { followTheme } from "./theme.js";
import { View } from "./view.js";

export async function render() {
  const view = new View(embeddedSource(), ownPlace());
  document.getElementById("view").replaceChildren(view.element);
  followTheme(() => view.draw());
  // Links of the first page lead to what they speak of.
  for (const link of document.querySelectorAll("a[data-show]")) link.addEventListener("click", () => view.element.scrollIntoView());
  await view.refresh();
}
