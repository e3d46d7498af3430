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

  // The width of the panels and the size of their letters. Four panels stand in two columns, which leaves more width; on a
  // phone there is one column. Large panels fill the screen, and their letters have 15 pixels.
  const narrow = matchMedia("(max-width: 56rem)");
  function look() {
    if (!large || narrow.matches) return Drawing.look(1, scene.panels.length === 4 && !narrow.matches ? 480 : 380);
    const box = shelf.getBoundingClientRect(), count = scene.panels.length, columns = count === 4 ? 2 : Math.min(count, 3);
    const wide = box.width / columns - 24, tall = box.height / (count === 4 ? 2 : 1) - 20, unit = Math.min(wide / 380, tall / 300);
    return Drawing.look(Math.max(1, Math.min(2, 1.35 / unit)), wide / unit, tall / unit);
  }

  // Draws everything again, for another scene, another colour scheme or larger letters.
  function draw() {
    const style = look(), figures = document.createDocumentFragment(), facts = document.createDocumentFragment();
    redraws = [];
    for (const panel of scene.panels) {
      const drawn = Drawing.draw(panel, style, last());
      make("figure", {}, figures).appendChild(drawn.svg);
      redraws.push(...drawn.redraws);
    }
    for (const number of scene.numbers) {
      const card = make("div", {}, facts);
      make("dt", {}, card, number.name);
      const value = make("dd", {}, card, number.values[number.values.length - 1]);
      make("dd", { class: "meaning" }, card, number.meaning);
      if (number.values.length > 1) redraws.push((now) => { value.textContent = number.values[now]; });
    }
    const count = scene.numbers.length;
    cards.style.setProperty("--columns", count > 6 ? Math.ceil(count / 2) : count); // rows of equal length
    shelf.dataset.panels = scene.panels.length;
    cards.replaceChildren(facts);
    shelf.replaceChildren(figures);
    bar.hidden = last() === 0;
    slide.max = last();
    show(Math.round(share * last()));
  }

  button.addEventListener("click", toggle);
  slide.addEventListener("input", () => { play(false); show(Number(slide.value)); });
  speed.addEventListener("change", () => play(timer !== null));
  for (const media of [matchMedia("(prefers-color-scheme: dark)"), narrow]) media.addEventListener("change", () => { if (scene) draw(); });
  addEventListener("resize", () => { if (scene && large) draw(); });
  play(false);

  return {
    // The position in the animation, and whether it plays, stay the same when a setting changes.
    open(next) { scene = Drawing.unpack(next); draw(); if (timer !== null) play(true); },
    show, toggle, last,
    stop: () => play(false),
    enlarge(on) { large = on; if (scene) draw(); },
    pictures: () => [...shelf.querySelectorAll("svg")],
    numbers: (longest = false) => scene.numbers.map(({ name, values }) => [
      name, longest ? values.reduce((a, b) => (b.length > a.length ? b : a)) : values[Math.min(frame, values.length - 1)]]),
    now: () => ({ frame, moment: scene.moments[frame], pause: TICK / Number(speed.value), drawn: scene !== null }),
    look,
  };
};
