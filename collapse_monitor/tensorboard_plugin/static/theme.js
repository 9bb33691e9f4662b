// Light and dark: TensorBoard does not tell its plugins, but the class of its own page does; alone, the reader's system decides.

/** Keep `data-theme` of the page right, and call back on every change. */
export function followTheme(changed) {
  const host = hostBody();
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const dark = host ? host.classList.contains("dark-mode") : system.matches;
    const theme = dark ? "dark" : "light";
    if (document.documentElement.dataset.theme !== theme) {
      document.documentElement.dataset.theme = theme;
      changed();
    }
  };
  if (host) new MutationObserver(apply).observe(host, { attributes: true, attributeFilter: ["class"] });
  else system.addEventListener("change", apply);
  apply();
}

/** Colours of the style sheet, for drawing. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: colour("text"),
    soft: colour("soft"),
    line: colour("line"),
    panel: colour("panel"),
    accent: colour("accent"),
    second: colour("second"),
    healthy: colour("healthy"),
    critical: colour("critical"),
    warning: colour("warning"),
    info: colour("info"),
    faint: colour("faint"),
  };
}

function hostBody() {
  try {
    return window.parent !== window ? window.parent.document.body : null;
  } catch {
    return null; // framed by a page of another origin
  }
}
