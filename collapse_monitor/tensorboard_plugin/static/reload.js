// A running training: look again every half minute while somebody looks, and whenever TensorBoard reloads.

const EVERY = 30000;

export function keepFresh(reload) {
  window.setInterval(() => {
    if (!document.hidden && window.innerWidth > 0) reload();
  }, EVERY);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) reload();
  });
  listenToHost(reload);
}

// TensorBoard's protocol for plugins: a channel handed over at the start, messages as JSON, each to be answered.
function listenToHost(reload) {
  if (window.parent === window) return;
  const channel = new MessageChannel();
  channel.port1.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (message.isReply) return;
    channel.port1.postMessage(JSON.stringify({ type: message.type, id: message.id, payload: null, error: null, isReply: true }));
    if (message.type === "experimental.DataReloaded") reload();
  };
  window.parent.postMessage("experimental.bootstrap", window.location.origin, [channel.port2]);
}
