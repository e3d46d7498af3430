// Shows scenes (see scene.py) in an element: a bar that plays them, their numbers and their panels.
"use strict";
const Player = (root) => {
  const TICK = 80; // milliseconds per frame at normal speed
  const make = (tag, attributes, parent, text) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  };
  const bar = make("div", { id: "bar", role: "group", "aria-label": "Training time" }, root);
  const button = make("button", { id: "play", type: "button" }, bar);
  const slide = make("input", { id: "time", type: "range", min: 0, "aria-label": "Training time" }, bar);
  const told = make("output", { id: "moment", for: "time" }, bar);
  const speed = make("select", { id: "speed" }, make("label", {}, bar, "Speed "));
  for (const factor of [0.25, 0.5, 1, 2, 4]) speed.add(new Option(`${factor}×`, factor, factor === 1, factor === 1));
  const turn = make("label", {}, bar);
  const loop = make("input", { id: "loop", type: "checkbox" }, turn);
  turn.append(" Loop");
  const cards = make("dl", { id: "numbers" }, root), shelf = make("div", { id: "panels" }, root);

  let scene = null, redraws = [], large = false, frame = 0, share = 1, timer = null;
  const longest = (values) => values.reduce((a, b) => (b.length > a.length ? b : a));
  const last = () => (scene ? scene.moments.length - 1 : 0);

  function show(next) {
    frame = Math.max(0, Math.min(next, last()));
    share = last() ? frame / last() : 1;
    for (const draw of redraws) draw(frame);
    slide.value = frame;
    told.textContent = scene.moments[frame];
    slide.setAttribute("aria-valuetext", scene.moments[frame]);
  }

  function step() {
    if (frame < last()) show(frame + 1);
    else if (loop.checked) show(0);
    else play(false);
  }
  function play(on) {
    clearInterval(timer);
    timer = on && last() > 0 ? setInterval(step, TICK / Number(speed.value)) : null;
    button.textContent = timer === null ? "▶ Play" : "❚❚ Pause";
  }
  function toggle() {
    if (timer === null && frame === last()) show(0);
    play(timer === null);
  }

  // The size of the panels and of their letters. Four panels stand in two columns, which leaves more width; on a phone there
  // is one column. All panels fit on the screen if they are not too flat then; what follows them may be below it. Large panels
  // fill the screen, and their letters have 15 pixels.
  const narrow = matchMedia("(max-width: 56rem)"), middling = matchMedia("(max-width: 70rem)");
  const GAP = 8, EDGES = 14, AFTER = 56, SMALLEST = 150, SMALL = 190; // in pixels; AFTER is the height of the footer
  const bounded = (low, value, high) => Math.max(low, Math.min(value, high));
  const standard = () => Drawing.look(1, scene.panels.length === 4 ? 480 : 380);
  const across = () => (narrow.matches ? 1 : middling.matches || scene.panels.length === 4 ? 2 : Math.min(3, scene.panels.length));
  function look() {
    if (narrow.matches) return Drawing.look();
    const box = shelf.getBoundingClientRect(), count = scene.panels.length;
    const columns = large ? (count === 4 ? 2 : Math.min(count, 3)) : across(), rows = large ? (count === 4 ? 2 : 1) : Math.ceil(count / columns);
    const wide = (box.width + GAP) / columns - GAP - EDGES;
    const room = (large ? box.height : innerHeight - box.top - scrollY) + GAP, each = (height) => height / rows - GAP - EDGES;
    const fitting = bounded(SMALLEST, Math.max(each(room - AFTER), Math.min(SMALL, each(room))), wide);
    const tall = large ? each(room) : each(room) < SMALLEST ? (300 / 380) * wide : fitting;
    const unit = Math.min(wide / 380, tall / 300);
    return Drawing.look(large ? bounded(1, 1.35 / unit, 2) : bounded(1, 0.9 / unit, 1.5), wide / unit, tall / unit);
  }

  // Draws everything again, for another scene, another colour scheme or larger letters.
  function draw() {
    const figures = document.createDocumentFragment(), facts = document.createDocumentFragment();
    redraws = [];
    for (const number of scene.numbers) {
      const card = make("div", {}, facts);
      make("dt", {}, card, number.name);
      const value = make("dd", {}, card, number.values[number.values.length - 1]);
      make("dd", { class: "meaning" }, card, number.meaning);
      value.style.minWidth = `${longest(number.values).length}ch`; // so that no card changes its height while time runs
      if (number.values.length > 1) redraws.push((now) => { value.textContent = number.values[now]; });
    }
    const count = scene.numbers.length;
    cards.style.setProperty("--columns", count > 6 ? Math.ceil(count / 2) : count); // rows of equal length
    shelf.dataset.panels = scene.panels.length;
    shelf.style.setProperty("--across", across());
    cards.replaceChildren(facts);
    bar.hidden = last() === 0;
    const style = look(); // the room that the numbers leave
    for (const panel of scene.panels) {
      const drawn = Drawing.draw(panel, style, last());
      make("figure", {}, figures).appendChild(drawn.svg);
      redraws.push(...drawn.redraws);
    }
    shelf.replaceChildren(figures);
    slide.max = last();
    show(Math.round(share * last()));
  }

  button.addEventListener("click", toggle);
  slide.addEventListener("input", () => { play(false); show(Number(slide.value)); });
  speed.addEventListener("change", () => play(timer !== null));
  matchMedia("screen and (prefers-color-scheme: dark)").addEventListener("change", () => { if (scene) draw(); });
  let breadth = innerWidth; // on a phone, scrolling changes the height of the window
  addEventListener("resize", () => {
    if (scene && !(narrow.matches && breadth === innerWidth)) draw();
    breadth = innerWidth;
  });
  play(false);

  return {
    // The position in the animation, and whether it plays, stay the same when a setting changes.
    open(next) { scene = Drawing.unpack(next); draw(); if (timer !== null) play(true); },
    show, toggle, last,
    stop: () => play(false),
    enlarge(on) { large = on; if (scene) draw(); },
    // The panels at this moment, in a size that does not depend on the window.
    pictures: () => scene.panels.map((panel) => {
      const drawn = Drawing.draw(panel, standard(), last());
      for (const redraw of drawn.redraws) redraw(frame);
      return drawn.svg;
    }),
    numbers: (longer = false) => scene.numbers.map(({ name, values }) => [
      name, longer ? longest(values) : values[Math.min(frame, values.length - 1)]]),
    finding: () => scene.finding,
    now: () => ({ frame, moment: scene.moments[frame], pause: TICK / Number(speed.value), drawn: scene !== null }),
    standard,
  };
};
