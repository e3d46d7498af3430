// The page of the explorer: tabs, settings, presets, the link, lecture mode, and what to do when the server stops.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id), { tabs, version } = EXPLORER, PORT = "2718";
  const make = (tag, attributes, parent, text) => {
    const node = Object.assign(document.createElement(tag), text === undefined ? {} : { textContent: text });
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.appendChild(node);
    return node;
  };
  const defaults = (tab) => Object.fromEntries(Object.entries(tab.settings).map(([name, setting]) => [name, setting.default]));
  const values = Object.fromEntries(tabs.map((tab) => [tab.name, defaults(tab)])); // of every tab, written as in links
  const player = Player($("scene"));
  let tab = tabs[0];

  // ── the link ──
  function read() {
    const link = new URLSearchParams(location.search);
    tab = tabs.find(({ name }) => name === link.get("tab")) || tabs[0];
    for (const [name, { options }] of Object.entries(tab.settings)) {
      if (options.includes(link.get(name))) values[tab.name][name] = link.get(name);
    }
  }
  function query() {
    const link = new URLSearchParams({ tab: tab.name });
    for (const [name, setting] of Object.entries(tab.settings)) {
      if (values[tab.name][name] !== setting.default) link.set(name, values[tab.name][name]);
    }
    return String(link);
  }

  // ── the scene: one request at a time, and the last settings always win ──
  let shown = null, busy = false;
  function complain(text) {
    $("message").textContent = text;
    $("message").hidden = !text;
  }
  async function refresh() {
    history.replaceState(null, "", `?${query()}`);
    $("html").href = `scene.html?${query()}`;
    if (busy) return;
    busy = true;
    while (shown !== query()) {
      const asked = query(), found = await scene(asked);
      if (!found) break;
      complain(found.error || "");
      if (found.status === 503) { await new Promise((done) => { setTimeout(done, 500); }); continue; }
      shown = asked;
      if (!found.error) { $("finding").textContent = found.finding; player.open(found); document.dispatchEvent(new Event("drawn")); }
    }
    busy = false;
    describe();
  }
  // Returns a scene, or an error; null if there is no server.
  async function scene(asked) {
    try {
      const answer = await fetch(`scene?${asked}`), kind = answer.headers.get("content-type") || "";
      return kind.startsWith("application/json") ? await answer.json() : { error: await answer.text(), status: answer.status };
    } catch { stopped(true); return null; }
  }
  let telling = null;
  function describe() { // for screen readers, once the settings rest
    clearTimeout(telling);
    telling = setTimeout(() => { if (player.now().drawn) $("aloud").textContent = player.numbers().slice(0, 3).map((pair) => pair.join(" ")).join(", "); }, 800);
  }
  const tell = (text) => { $("said").textContent = text; };

  // ── settings ──
  function change(name, value) {
    values[tab.name][name] = value;
    highlight(name);
    mark();
    refresh();
  }
  function highlight(name) {
    for (const piece of $("equation").children) piece.classList.toggle("lit", piece.dataset.setting === name);
  }
  const ELEMENTS = {
    steps(name, setting, id, row, head) {
      const told = make("output", { for: id }, head);
      const slider = make("input", { type: "range", id, min: 0, max: setting.options.length - 1, step: 1 }, row);
      const label = () => {
        told.textContent = setting.shown[Number(slider.value)];
        slider.setAttribute("aria-valuetext", told.textContent);
      };
      slider.addEventListener("input", () => { label(); change(name, setting.options[Number(slider.value)]); });
      return [slider, (value) => { slider.value = setting.options.indexOf(value); label(); }];
    },
    choice(name, setting, id, row) {
      const menu = make("select", { id }, row);
      setting.options.forEach((option, i) => menu.add(new Option(setting.shown[i], option)));
      menu.addEventListener("change", () => change(name, menu.value));
      return [menu, (value) => { menu.value = value; }];
    },
    switch(name, setting, id, row, head) {
      const box = make("input", { type: "checkbox", role: "switch", id }, head);
      box.addEventListener("change", () => change(name, box.checked ? "True" : "False"));
      return [box, (value) => { box.checked = value === "True"; }];
    },
  };
  let place = {}; // functions that put a value into the element of a setting
  function settings() {
    place = {};
    $("first").replaceChildren();
    $("rest").replaceChildren();
    Object.entries(tab.settings).forEach(([name, setting], i) => {
      const row = make("div", { class: "setting", "data-setting": name }, i ? $("rest") : $("first")), id = `setting-${name}`;
      const head = make("div", { class: "head" }, row);
      make("label", { for: id }, head, setting.label);
      const [element, put] = ELEMENTS[setting.kind](name, setting, id, row, head);
      make("div", { class: "soft", id: `${id}-meaning` }, row, setting.meaning);
      element.setAttribute("aria-describedby", `${id}-meaning`);
      element.addEventListener("focus", () => highlight(name));
      put(values[tab.name][name]);
      place[name] = put;
    });
  }
  function presets() {
    $("presets").replaceChildren();
    tab.presets.forEach(({ title }, i) => {
      const button = make("button", { type: "button", "data-preset": i }, $("presets"), title);
      make("kbd", { "aria-hidden": "true" }, button, String(i + 1));
      button.addEventListener("click", () => choose(i));
    });
  }
  const wanted = (preset) => ({ ...defaults(tab), ...preset.values });
  function choose(i) {
    if (!tab.presets[i]) return;
    values[tab.name] = wanted(tab.presets[i]);
    for (const [name, put] of Object.entries(place)) put(values[tab.name][name]);
    highlight(Object.keys(tab.presets[i].values)[0] || Object.keys(tab.settings)[0]);
    mark();
    refresh();
  }
  function mark() { // the preset that is in use
    const same = (preset) => Object.entries(wanted(preset)).every(([name, value]) => values[tab.name][name] === value);
    [...$("presets").children].forEach((button, i) => button.setAttribute("aria-pressed", same(tab.presets[i])));
  }

  // ── tabs: arrow keys move between them, and Enter or a click opens one ──
  const heads = tabs.map((each, i) => {
    const head = make("button", { type: "button", role: "tab", id: `tab-${each.name}`, "aria-controls": "panel" }, $("tabs"), each.title);
    head.addEventListener("click", () => { tab = each; open(); });
    head.addEventListener("keydown", (event) => {
      const to = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      heads[(to + tabs.length) % tabs.length].focus();
    });
    return head;
  });
  // Scrolls the row of tabs on a phone. `scrollIntoView` would also move the place from which the Tab key starts.
  function reveal(head) {
    const row = $("tabs"), [outer, inner] = [row, head].map((node) => node.getBoundingClientRect());
    if (inner.left < outer.left || inner.right > outer.right) row.scrollLeft += inner.left - outer.left - 8;
  }
  function open() {
    heads.forEach((head, i) => {
      head.setAttribute("aria-selected", tabs[i] === tab);
      head.tabIndex = tabs[i] === tab ? 0 : -1;
      if (tabs[i] === tab) reveal(head);
    });
    $("panel").setAttribute("aria-labelledby", `tab-${tab.name}`);
    document.title = `${tab.title} · lazyscope explorer`;
    $("tale").textContent = tab.story;
    $("finding").textContent = "";
    $("equation").replaceChildren();
    for (const [text, name] of tab.equation) make("span", name ? { "data-setting": name } : {}, $("equation"), text);
    settings();
    presets();
    mark();
    refresh();
  }

  // ── lecture mode ──
  function lecture(on) {
    document.body.classList.toggle("lecture", on);
    $("lecture").setAttribute("aria-pressed", on);
    player.enlarge(on);
    if (on && !document.fullscreenElement) document.documentElement.requestFullscreen?.().catch(() => {}); // without it, too
    if (!on && document.fullscreenElement) document.exitFullscreen();
  }
  const lecturing = () => document.body.classList.contains("lecture");
  $("lecture").addEventListener("click", () => lecture(!lecturing()));
  document.addEventListener("fullscreenchange", () => { if (!document.fullscreenElement && lecturing()) lecture(false); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && lecturing()) { lecture(false); return; }
    if (!$("shortcuts").checked || event.target.tagName === "SELECT") return;
    const key = event.key.toLowerCase();
    if (key === "f") lecture(!lecturing());
    else if (key === "p") player.toggle();
    else if (/^[1-9]$/.test(key)) choose(Number(key) - 1);
  });

  // ── the server ──
  let gone = false;
  function stopped(now, reason = "") {
    if (now === gone && !reason) return;
    gone = now;
    $("stopped").hidden = !now;
    $("stopped").replaceChildren();
    if (!now) { refresh(); return; }
    make("b", {}, $("stopped"), reason || "The explorer was stopped. ");
    if (reason) return;
    $("stopped").append("Start it again with ");
    make("code", {}, $("stopped"), `lazyscope explore${location.port === PORT ? "" : ` --port ${location.port}`}`);
    $("stopped").append(", and this page continues by itself. Until then it plays and saves the scene that it shows.");
  }
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const answer = await fetch("health");
      stopped(!answer.ok, answer.ok ? "" : await answer.text());
    } catch { stopped(true); }
  }, 2000);

  // ── saving ──
  const facts = () => ({
    version, title: tab.title, file: `lazyscope-${query().replace(/[^\w.-]+/g, "-").replace(/^tab-/, "")}`,
    caption: Object.entries(tab.settings).map(([name, { label, options, shown: texts }]) => `${label}: ${texts[options.indexOf(values[tab.name][name])]}`),
  });
  Export.buttons($("save"), player, facts, tell);
  make("a", { id: "html", download: "", title: "A page that plays this scene without a server" }, $("save"), "HTML");

  const wide = matchMedia("(min-width: 56rem)"), unfold = () => { $("more").open = wide.matches; };
  wide.addEventListener("change", unfold);
  unfold();
  read();
  open();
})();
