// The little that a page does by itself: theme, figures, keys, the checkpoint slider, token shading, selection of ids.
// Everything else works without it. It uses no framework, and makes requests of its own service only.
"use strict";
(() => {
  const root = document.documentElement;
  const all = (what, inside = document) => [...inside.querySelectorAll(what)];
  const one = (what, inside = document) => inside.querySelector(what);

  const memory = {
    get(name) { try { return localStorage.getItem(`backstory-${name}`); } catch { return null; } },
    set(name, value) { try { localStorage.setItem(`backstory-${name}`, value); } catch { /* a private window */ } },
  };

  // -- theme: the system's, until somebody chooses ------------------------------------------------------------
  const THEMES = ["system", "light", "dark"];
  const theme = () => (THEMES.includes(memory.get("theme")) ? memory.get("theme") : "system");
  function showTheme() {
    if (theme() === "system") root.removeAttribute("data-theme"); else root.setAttribute("data-theme", theme());
    for (const button of all("[data-theme-button]")) button.textContent = `Theme: ${theme()}`;
  }
  function nextTheme() {
    memory.set("theme", THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    showTheme();
    drawAll();
  }
  showTheme(); // before the first paint

  // -- figures: JSON beside the place where they are drawn, colours by the names that the style sheet gives them ---
  function colour(name) {
    const probe = document.createElement("span");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const match = getComputedStyle(probe).color;
    probe.remove();
    return match;
  }
  function coloured(value, known = {}) {
    if (typeof value === "string") {
      const match = /^var\((--[a-z-]+)\)$/.exec(value);
      return match ? (known[match[1]] ??= colour(match[1])) : value;
    }
    if (Array.isArray(value)) return value.map((x) => coloured(x, known));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, known)]));
  }
  let loading = null;
  function plotly() {
    if (window.Plotly) return Promise.resolve(window.Plotly);
    loading ??= new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = "/static/plotly.min.js";
      script.onload = () => done(window.Plotly);
      script.onerror = failed;
      document.head.append(script);
    });
    return loading;
  }
  async function draw(place) {
    const figure = coloured(JSON.parse(one(`#${place.dataset.figure}`).textContent));
    const made = await plotly();
    await made.react(place, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    if (!place.dataset.drawn && figure.layout.meta?.links) {
      place.on("plotly_click", (event) => {
        const link = figure.layout.meta.links[event.points[0].pointNumber];
        if (link) location.assign(link);
      });
    }
    place.dataset.drawn = "yes";
  }
  const drawAll = (inside = document) => Promise.all(all("[data-figure]", inside).map(draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());

  // -- a part of the page replaced by what the service says -----------------------------------------------------
  const SILENT = '<p class="banner problem">The service does not respond.</p>';
  async function fetchPage(url, options = {}) {
    const read = (text) => new DOMParser().parseFromString(text, "text/html");
    try {
      const answer = await fetch(url, { ...options, headers: { Accept: "text/html", ...(options.headers ?? {}) } });
      return read(await answer.text());
    } catch {
      return read(SILENT);
    }
  }
  function say(words) { const place = one("#status"); if (place) place.textContent = words; }
  function complain(place, page) {
    one(":scope > .problem", place)?.remove();
    place.prepend(document.adoptNode(one(".problem", page) ?? document.createTextNode("No response.")));
    say(one(".problem", place)?.textContent.trim() ?? "No response.");
  }
  const latest = {}; // of several requests for one place, only the last may fill it
  async function replace(id, url, options, also = () => {}) {
    const mine = (latest[id] = Symbol(id));
    one(`#${id}`).setAttribute("aria-busy", "true");
    try {
      const page = await fetchPage(url, options);
      if (latest[id] !== mine) return;
      const old = one(`#${id}`), fresh = one(`#${id}`, page);
      if (!fresh) {
        complain(old, page);
        return;
      }
      also(page);
      old.replaceWith(document.adoptNode(fresh));
      await begin(fresh);
    } finally {
      if (latest[id] === mine) one(`#${id}`)?.removeAttribute("aria-busy");
    }
  }

  // -- the checkpoint slider: the same query of the model as it was ----------------------------------------
  function request(form) {
    const kind = form.dataset.kind;
    if (form.method === "get") return [`${form.getAttribute("action")}?${new URLSearchParams(new FormData(form))}`, {}];
    const body = new FormData(form);
    const picture = kind === "image" ? one("img[data-input]") : null;
    if (picture) body.set("image", pictureFile(picture.src));
    return [form.getAttribute("action"), { method: "POST", body: picture ? body : new URLSearchParams(body) }];
  }
  function pictureFile(url) {
    const bytes = Uint8Array.from(atob(url.split(",")[1]), (c) => c.charCodeAt(0));
    return new File([bytes], "query.png", { type: url.slice(5, url.indexOf(";")) });
  }
  // what stands outside the ranking and belongs to the same checkpoint: the query's card, later queries, the JSON
  function follow(page) {
    one("[data-card]").replaceWith(document.adoptNode(one("[data-card]", page)));
    for (const field of all("input[type=hidden][name=at]")) field.value = one("#ranking", page).dataset.at;
    const twin = 'footer a[href*="format=json"]', fresh = one(twin, page);
    if (fresh) one(twin)?.setAttribute("href", fresh.getAttribute("href"));
  }
  function slider(form) {
    const select = one("select[name=at]", form), range = one("input[type=range]", form), steps = [...select.options];
    if (steps.length < 2) return;
    one("[data-slider]", form).hidden = false;
    one("[data-plain]", form).hidden = true;
    range.max = steps.length - 1;
    range.value = select.selectedIndex;
    const output = one("output", form);
    const show = () => { output.textContent = range.ariaValueText = steps[range.value].textContent; };
    const ask = () => {
      select.selectedIndex = Number(range.value);
      say(`Ranking at ${steps[range.value].textContent}`);
      return replace("ranking", ...request(form), follow);
    };
    range.addEventListener("input", show);
    range.addEventListener("change", ask);
    one("[data-play]", form).addEventListener("click", (event) => play(event.currentTarget, range, show, ask));
    show();
  }
  async function play(button, range, show, ask) {
    const running = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!running));
    if (running) return;
    const from = range.value === range.max ? 0 : Number(range.value) + 1;
    for (let k = from; k <= Number(range.max) && button.getAttribute("aria-pressed") === "true"; k += 1) {
      range.value = k;
      show();
      await ask();
      await new Promise((done) => setTimeout(done, 700));
    }
    button.setAttribute("aria-pressed", "false");
  }
  // the same in a report, which asks nobody: it holds the answers at all checkpoints
  function moments(form) {
    const parts = all("[data-moment]"), range = one("input[type=range]", form), output = one("output", form);
    one("[data-slider]", form).hidden = false;
    range.value = range.max = parts.length - 1;
    const show = () => {
      parts.forEach((x, k) => { x.hidden = k !== Number(range.value); });
      output.textContent = range.ariaValueText = parts[range.value].dataset.moment;
    };
    range.addEventListener("input", show);
    one("[data-play]", form).addEventListener("click", (event) => play(event.currentTarget, range, show, () => say(`Ranking at ${output.textContent}`)));
    show();
  }
  // -- token shading, on demand ------------------------------------------------------------------------------------
  async function shade(form) {
    form.setAttribute("aria-busy", "true");
    say("Asking which tokens mattered: training is played again, which may take a while.");
    try {
      const page = await fetchPage(...request(form));
      const match = all(".hit[data-id]", page);
      for (const item of match) {
        const text = all("#ranking .hit").find((x) => x.dataset.id === item.dataset.id)?.querySelector(".text");
        text?.replaceWith(document.adoptNode(one(".tokens", item)));
      }
      if (!match.length) {
        complain(form, page);
        return;
      }
      const words = "Tokens are shaded: solid underline helped, dotted underline hurt.";
      form.replaceWith(words);
      say(words);
    } finally {
      form.removeAttribute("aria-busy");
    }
  }

  // -- selection and export of ids -------------------------------------------------------------------------------
  function selection(form) {
    const ticks = all("input[name=id]", form), every = one("[data-all]", form), output = one("[data-count]", form);
    const chosen = () => ticks.filter((x) => x.checked);
    const show = () => {
      output.textContent = `${chosen().length} of ${ticks.length} selected`;
      every.checked = chosen().length === ticks.length;
      every.indeterminate = chosen().length > 0 && !every.checked;
      for (const x of ticks) x.closest("tr").classList.toggle("chosen", x.checked);
      for (const button of all("[data-needs-choice]", form)) button.disabled = chosen().length === 0;
    };
    every.addEventListener("change", () => { for (const x of ticks) x.checked = every.checked; show(); });
    for (const x of ticks) x.addEventListener("change", show);
    one("[data-export]", form).addEventListener("click", () => {
      const quoted = (x) => `"${x.replaceAll('"', '""')}"`;
      const rows = chosen().map((x) => `${quoted(x.value)},${x.dataset.influence}`);
      save("harmful-ids.csv", ["id,influence", ...rows, ""].join("\r\n"));
      say(`${rows.length} ids exported`);
    });
    one("[data-copy]", form).addEventListener("click", async () => {
      await navigator.clipboard.writeText(chosen().map((x) => x.value).join("\n"));
      say(`${chosen().length} ids copied`);
    });
    one("[data-copy]", form).hidden = !navigator.clipboard; // a browser has it on loopback and over TLS only
    all(".needs-script", form).forEach((x) => { x.hidden = false; });
    show();
  }
  function save(name, text) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // -- keys: single letters, unless somebody types or has switched them off ---------------------------------------
  const GO = { o: "/", q: "/query", s: "/samples", r: "/sources", h: "/harmful" };
  const RANGE = "[data-slider] input[type=range]";
  const keysOn = () => memory.get("keys") !== "off";
  function typing(target) { return target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]"); }
  function pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || !keysOn() || one("dialog[open]")) return;
    const key = event.key.toLowerCase();
    if (key === "?") one("#keys")?.showModal();
    else if (key === "t") nextTheme();
    else if (key === "/") one("[data-first]")?.focus();
    else if ((key === "[" || key === "]") && one(RANGE)) move(key === "]" ? 1 : -1);
    else if (GO[key] && !one("[data-report]")) location.assign(GO[key]);
    else return;
    event.preventDefault();
  }
  function move(by) {
    const range = one(RANGE);
    range.value = Number(range.value) + by;
    for (const name of ["input", "change"]) range.dispatchEvent(new Event(name));
  }
  function keys() {
    const box = one("#keys-on");
    document.addEventListener("keydown", pressed);
    for (const button of all("[data-keys-button]")) { button.hidden = false; button.addEventListener("click", () => one("#keys").showModal()); }
    if (!box) return;
    box.checked = keysOn();
    box.addEventListener("change", () => memory.set("keys", box.checked ? "on" : "off"));
  }

  // -- all of it ---------------------------------------------------------------------------------------------------
  async function begin(inside) {
    all("form[data-query]", inside).forEach(slider);
    all("form[data-moments]", inside).forEach(moments);
    all("form[data-selection]", inside).forEach(selection);
    all("form[data-shade]", inside).forEach((x) => x.addEventListener("submit", (e) => { e.preventDefault(); shade(x); }));
    all("a[data-replace]", inside).forEach((x) => x.addEventListener("click", (e) => { e.preventDefault(); replace(x.dataset.replace, x.getAttribute("href")); }));
    all("form[data-replace]", inside).forEach((x) => x.addEventListener("submit", (e) => { e.preventDefault(); replace(x.dataset.replace, ...request(x)); }));
    await drawAll(inside);
  }
  document.addEventListener("DOMContentLoaded", () => {
    for (const button of all("[data-theme-button]")) { button.hidden = false; button.addEventListener("click", nextTheme); }
    showTheme();
    keys();
    begin(document);
  });
})();
