// What is shown, in the URL: a link is what its sender saw. Steps are kept as steps, so that new readings do not move them.

const TEXTS = ["run", "compare", "metric", "mode", "scale"];
const NUMBERS = ["step", "layer", "from", "to"];

/** The place of the state in TensorBoard: its page's fragment, beside the name of the tab. */
export function hostPlace(plugin) {
  const prefix = `p.${plugin}.`;
  const host = () => (window.parent !== window ? window.parent : window);
  return {
    read: () => parseState(host().location.hash, prefix),
    write: (state) => {
      const parts = host().location.hash.replace(/^#/, "").split("&");
      if (parts[0] !== plugin) return; // another tab is in front
      const others = parts.filter((part) => !part.startsWith(prefix));
      replaceHash(host(), [...others, ...formatState(state, prefix)].join("&"));
    },
    onChange: (changed) => host().addEventListener("hashchange", changed),
  };
}

/** The place of the state in a page of its own. */
export function ownPlace() {
  return {
    read: () => parseState(window.location.hash, ""),
    write: (state) => replaceHash(window, formatState(state, "").join("&")),
    onChange: (changed) => window.addEventListener("hashchange", changed),
  };
}

export function parseState(hash, prefix) {
  const state = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const cut = part.indexOf("=");
    if (cut < 0 || !part.startsWith(prefix)) continue;
    const name = part.slice(prefix.length, cut);
    const text = decode(part.slice(cut + 1));
    if (TEXTS.includes(name)) state[name] = text;
    else if (NUMBERS.includes(name) && text !== "" && Number.isFinite(Number(text))) state[name] = Number(text);
  }
  return state;
}

export function formatState(state, prefix) {
  return [...TEXTS, ...NUMBERS]
    .filter((name) => state[name] !== null && state[name] !== undefined && state[name] !== "")
    .map((name) => `${prefix}${name}=${encodeURIComponent(state[name])}`);
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

// Without an entry in the history: looking around is no journey. The address is whole, because a short one would be relative to this frame.
function replaceHash(target, hash) {
  const [address, now = ""] = target.location.href.split("#");
  if (now !== hash) target.location.replace(`${address}#${hash}`);
}
