// Requests to the server, which only reads, and the stream of what changes.

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== null && one !== undefined) query.append(name, one);
  }
  const answer = await fetch(`/api/${path}?${query}`);
  const value = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(value.error);
  return value;
}

// Calls `changed(values, gone)` for as long as the page is in sight. A browser opens few connections to one server:
// a page in the background gives its own back.
export function watch(ids, changed) {
  const live = document.getElementById("live");
  let source = null;
  const close = () => {
    source?.close();
    source = null;
  };
  const open = () => {
    if (source || document.hidden) return;
    const query = new URLSearchParams(ids.map((id) => ["id", id]));
    source = new EventSource(`/api/events?${query}`);
    source.addEventListener("open", () => show(live, "on", "live"));
    source.addEventListener("error", () => show(live, "off", "the server does not answer"));
    source.addEventListener("change", (event) => {
      const { changed: values, gone } = JSON.parse(event.data);
      changed(values, gone);
    });
  };
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  window.addEventListener("pagehide", close);
  open();
}

function show(element, state, text) {
  if (element.dataset.state === state) return;
  element.dataset.state = state;
  element.textContent = text;
}

// At most one call at a time, and none too soon after a slow one: `task` may be asked for as often as one likes.
export function throttled(task, shortest = 1000) {
  let running = false;
  let again = false;
  return async function ask() {
    if (running) {
      again = true;
      return;
    }
    running = true;
    const began = performance.now();
    try {
      await task();
    } catch (error) {
      console.info(`windlass: ${error.message}`); // a run folder may vanish between two looks
    }
    const took = performance.now() - began;
    setTimeout(() => {
      running = false;
      if (again) {
        again = false;
        ask();
      }
    }, Math.max(shortest, Math.min(10000, 5 * took)));
  };
}
