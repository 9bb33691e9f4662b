// Elements made in code. Names of runs and layers are other people's text: they become text nodes, never markup.

/** An element with properties (`dataset` and `aria-…` included) and children, which are elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "dataset") Object.assign(element.dataset, value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A list of choices with its label; `choose` is told the value taken. */
export function makeChoice(label, choose) {
  const select = make("select", { onchange: () => choose(select.value) });
  return { element: make("label", { className: "choice" }, make("span", {}, label), select), select };
}

/** Fill a list of choices, unless it holds them already: a list that is open must not be rebuilt. */
export function fillChoice(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.replaceChildren(...options.map(([key, text]) => make("option", { value: key }, text)));
    select.dataset.options = wanted;
  }
  select.value = value;
}
