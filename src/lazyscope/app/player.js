// Draws SCENE (see scene.py) as SVG and animates it. Marks with one row per frame are redrawn when the frame changes.
"use strict";
(() => {
  const W = 380, H = 300, EDGE = { left: 46, right: 12, top: 26, bottom: 36 };
  const TICK = 80; // milliseconds per frame
  const NS = "http://www.w3.org/2000/svg";
  const last = SCENE.moments.length - 1;

  // Converts packed arrays (see scene.py) to nested lists in place; numbers that are not finite become null.
  function rows(flat, shape) {
    if (shape.length < 2) return Array.from(flat, (v) => (Number.isFinite(v) ? v : null));
    const size = flat.length / (shape[0] || 1);
    return Array.from({ length: shape[0] }, (_, i) => rows(flat.subarray(i * size, (i + 1) * size), shape.slice(1)));
  }
  function unpack(value) {
    if (value === null || typeof value !== "object") return value;
    if ("packed" in value) return rows(new Float32Array(Uint8Array.from(atob(value.packed), (c) => c.charCodeAt(0)).buffer), value.shape);
    for (const name of Object.keys(value)) value[name] = unpack(value[name]);
    return value;
  }
  unpack(SCENE);

  function make(tag, attributes, parent, text) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  }

  function html(tag, attributes, parent, text) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }

  const moving = (values) => Array.isArray(values) && Array.isArray(values[0]);
  const at = (values, frame) => (moving(values) ? values[Math.min(frame, values.length - 1)] : values);
  const each = (value, i) => (Array.isArray(value) ? value[i % value.length] : value);

  // Maps data to pixels along one axis; null if there is nothing to draw.
  function scale(axis, from, to) {
    const map = axis.log ? Math.log10 : (v) => v;
    const low = map(axis.low), high = map(axis.high);
    return (v) => {
      if (v === null || (axis.log && v <= 0)) return null;
      const share = (map(v) - low) / (high - low);
      return from + (to - from) * Math.max(-20, Math.min(20, share));
    };
  }

  function ticks(axis) {
    if (axis.log) {
      const first = Math.ceil(Math.log10(axis.low) - 1e-9), end = Math.floor(Math.log10(axis.high) + 1e-9);
      const stride = Math.max(1, Math.ceil((end - first + 1) / 6));
      const found = [];
      for (let e = first; e <= end; e += stride) found.push(10 ** e);
      if (found.length > 1) return found;
      return [1, 2, 5].flatMap((k) => [first - 1, first].map((e) => k * 10 ** e))
        .filter((v) => v >= axis.low && v <= axis.high).sort((a, b) => a - b);
    }
    const rough = (axis.high - axis.low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find((k) => k * unit >= rough);
    const found = [];
    for (let v = Math.ceil(axis.low / step) * step; v <= axis.high + 1e-9 * step; v += step) found.push(Math.abs(v) < 1e-9 * step ? 0 : v);
    return found;
  }

  const raised = (n) => String(n).replace(/[-\d]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  function written(v, log) {
    const e = Math.round(Math.log10(Math.abs(v)));
    if (log && Math.abs(e) > 2 && Math.abs(v / 10 ** e - 1) < 1e-6) return "10" + raised(e);
    return String(Number(v.toPrecision(4))).replace("-", "−");
  }

  function frameOf(panel, svg) {
    const bare = !panel.x.ticks && !panel.y.ticks;
    let box = { left: bare ? 8 : EDGE.left, right: W - EDGE.right, top: EDGE.top, bottom: H - (bare ? 8 : EDGE.bottom) };
    if (panel.note) box.bottom -= bare ? 14 : 0;
    if (panel.equal) { // both axes have the same scale, which the smaller side determines
      const wide = panel.x.high - panel.x.low, tall = panel.y.high - panel.y.low;
      const unit = Math.min((box.right - box.left) / wide, (box.bottom - box.top) / tall);
      const middle = (box.left + box.right) / 2, centre = (box.top + box.bottom) / 2;
      box = { left: middle - unit * wide / 2, right: middle + unit * wide / 2, top: centre - unit * tall / 2, bottom: centre + unit * tall / 2 };
    }
    const X = scale(panel.x, box.left, box.right), Y = scale(panel.y, box.bottom, box.top);
    make("text", { x: bare ? 8 : EDGE.left, y: 15, class: "title" }, svg, panel.title);
    if (panel.note) make("text", { x: bare ? W / 2 : box.right, y: bare ? H - 6 : box.top + 11, "text-anchor": bare ? "middle" : "end" }, svg, panel.note);
    const grid = make("g", {}, svg);
    if (panel.x.ticks) {
      for (const v of ticks(panel.x)) {
        make("line", { x1: X(v), x2: X(v), y1: box.top, y2: box.bottom, stroke: "#e6e6e6", "stroke-width": 0.7 }, grid);
        make("text", { x: X(v), y: box.bottom + 14, "text-anchor": "middle" }, svg, written(v, panel.x.log));
      }
      make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: "#444" }, svg);
      make("text", { x: (box.left + box.right) / 2, y: box.bottom + 30, "text-anchor": "middle" }, svg, panel.x.label);
    }
    if (panel.y.ticks) {
      for (const v of ticks(panel.y)) {
        make("line", { x1: box.left, x2: box.right, y1: Y(v), y2: Y(v), stroke: "#e6e6e6", "stroke-width": 0.7 }, grid);
        make("text", { x: box.left - 5, y: Y(v) + 4, "text-anchor": "end" }, svg, written(v, panel.y.log));
      }
      make("line", { x1: box.left, x2: box.left, y1: box.top, y2: box.bottom, stroke: "#444" }, svg);
      if (panel.y.label) make("text", { x: 11, y: (box.top + box.bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 11 ${(box.top + box.bottom) / 2})` }, svg, panel.y.label);
    }
    const clip = `clip${clips++}`;
    make("rect", { x: box.left - 1, y: box.top - 1, width: box.right - box.left + 2, height: box.bottom - box.top + 2 }, make("clipPath", { id: clip }, svg));
    return { X, Y, box, inside: make("g", { "clip-path": `url(#${clip})` }, svg) };
  }
  let clips = 0;

  function path(points) { // lifts the pen at gaps
    let d = "", down = false;
    for (const [x, y] of points) {
      if (x === null || y === null) { down = false; continue; }
      d += `${down ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      down = true;
    }
    return d;
  }

  // Each entry maps (mark, place, group) to draw(frame) and whether it must be called for every frame.
  const DRAW = {
    picture(mark, { box, inside }) {
      make("image", { href: mark.source, x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, preserveAspectRatio: "none" }, inside);
    },
    line(mark, { X, Y, inside }) {
      const line = make("path", { fill: "none", stroke: mark.colour, "stroke-width": mark.width, "stroke-dasharray": mark.dash, "stroke-linejoin": "round" }, inside);
      const draw = (frame) => { const x = at(mark.x, frame), y = at(mark.y, frame); line.setAttribute("d", path(y.map((v, i) => [X(x[i]), Y(v)]))); };
      draw(last);
      return moving(mark.y) || moving(mark.x) ? draw : null;
    },
    dots(mark, { X, Y, inside }) {
      const count = at(mark.x, 0).length, edge = { stroke: mark.edge, "stroke-width": 0.7 };
      const nodes = Array.from({ length: count }, (_, i) => make("circle", { fill: each(mark.colour, i), ...edge }, inside));
      const draw = (frame) => {
        const x = at(mark.x, frame), y = at(mark.y, frame), size = at(mark.size, frame);
        nodes.forEach((node, i) => {
          const px = X(x[i]), py = Y(y[i]);
          node.setAttribute("visibility", px === null || py === null ? "hidden" : "visible");
          if (px !== null && py !== null) { node.setAttribute("cx", px.toFixed(1)); node.setAttribute("cy", py.toFixed(1)); }
          node.setAttribute("r", each(size, i));
        });
      };
      draw(last);
      return [mark.x, mark.y, mark.size].some(moving) ? draw : null;
    },
    trails(mark, { X, Y, inside }) {
      const count = mark.x[0].length;
      const nodes = Array.from({ length: count }, (_, i) => make("path", { fill: "none", stroke: each(mark.colour, i), "stroke-width": mark.width, opacity: 0.7 }, inside));
      return (frame) => nodes.forEach((node, i) => node.setAttribute("d", path(mark.x.slice(0, frame + 1).map((row, t) => [X(row[i]), Y(mark.y[t][i])]))));
    },
    arrows(mark, { X, Y, inside }) {
      mark.x.forEach((x, i) => {
        const [x0, y0, x1, y1] = [X(0), Y(0), X(x), Y(mark.y[i])], turn = Math.atan2(y1 - y0, x1 - x0);
        const wing = (side) => `${x1 - 11 * Math.cos(turn + side)},${y1 - 11 * Math.sin(turn + side)}`;
        make("line", { x1: x0, y1: y0, x2: x1 - 7 * Math.cos(turn), y2: y1 - 7 * Math.sin(turn), stroke: each(mark.colour, i), "stroke-width": 2.4 }, inside);
        make("polygon", { points: `${x1},${y1} ${wing(0.42)} ${wing(-0.42)}`, fill: each(mark.colour, i) }, inside);
      });
    },
    signs(mark, { X, Y, inside }) {
      mark.x.forEach((x, i) => {
        const px = X(x), py = Y(mark.y[i]), bar = { stroke: each(mark.colour, i), "stroke-width": 1.7 };
        make("line", { x1: px - 4, x2: px + 4, y1: py, y2: py, ...bar }, inside);
        if (mark.positive[i]) make("line", { x1: px, x2: px, y1: py - 4, y2: py + 4, ...bar }, inside);
      });
    },
    cursor(mark, { X, box, inside }) {
      const line = make("line", { y1: box.top, y2: box.bottom, stroke: "#444", "stroke-width": 1, "stroke-dasharray": "3 3" }, inside);
      return (frame) => { const x = X(mark.x[frame]); line.setAttribute("visibility", x === null ? "hidden" : "visible"); if (x !== null) { line.setAttribute("x1", x); line.setAttribute("x2", x); } };
    },
    regions(mark, { X, Y, inside }) {
      const node = make("path", { fill: mark.colour, stroke: mark.edge, "stroke-width": 1.5, "fill-rule": "evenodd" }, inside);
      return (frame) => node.setAttribute("d", mark.rings[frame].map((ring) => path(ring.map(([x, y]) => [X(x), Y(y)])) + "Z").join(""));
    },
  };

  // Places the legend in the corner where it hides the fewest points.
  function legend(panel, svg, { X, Y, box }) {
    const named = panel.marks.filter((mark) => mark.label);
    if (!named.length) return;
    const wide = 30 + 6.2 * Math.max(...named.map((mark) => mark.label.length)), tall = 15 * named.length + 6;
    const points = panel.marks.filter((mark) => mark.kind === "line" || mark.kind === "dots").flatMap((mark) => {
      const x = at(mark.x, last), y = at(mark.y, last);
      return y.map((v, i) => [X(x[i]), Y(v)]).filter(([px, py]) => px !== null && py !== null);
    });
    const corners = [[box.right - wide, box.top], [box.left + 4, box.top], [box.right - wide, box.bottom - tall], [box.left + 4, box.bottom - tall]];
    const hidden = corners.map(([x, y]) => points.filter(([px, py]) => px > x && px < x + wide && py > y && py < y + tall).length);
    const [x, top] = corners[hidden.indexOf(Math.min(...hidden))];
    make("rect", { x, y: top, width: wide, height: tall, fill: "white", opacity: 0.8 }, svg);
    named.forEach((mark, i) => {
      const y = top + 10 + 15 * i, colour = each(mark.colour, 0);
      if (mark.kind === "dots") make("circle", { cx: x + 12, cy: y, r: 3.5, fill: colour, stroke: mark.edge }, svg);
      else make("line", { x1: x + 3, x2: x + 21, y1: y, y2: y, stroke: colour, "stroke-width": 2, "stroke-dasharray": mark.dash || "" }, svg);
      make("text", { x: x + 26, y: y + 4, class: "legend" }, svg, mark.label);
    });
  }

  const redraws = [];
  const bar = html("div", { id: "bar" }, document.body);
  const cards = html("div", { id: "numbers" }, document.body), shelf = html("div", { id: "panels" }, document.body);
  for (const panel of SCENE.panels) {
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": panel.title }, html("figure", {}, shelf));
    const place = frameOf(panel, svg);
    for (const mark of panel.marks) { const draw = DRAW[mark.kind](mark, place); if (draw) redraws.push(draw); }
    legend(panel, svg, place);
  }
  const count = SCENE.numbers.length;
  cards.style.setProperty("--columns", count > 6 ? Math.ceil(count / 2) : count); // rows of equal length
  for (const number of SCENE.numbers) {
    const card = html("div", {}, cards);
    html("span", { class: "name" }, card, number.name);
    const value = html("b", {}, card, number.values[number.values.length - 1]);
    html("span", {}, card, number.meaning);
    if (number.values.length > 1) redraws.push((frame) => { value.textContent = number.values[frame]; });
  }

  // The position in the animation, and whether it plays, are kept when a setting changes.
  const key = `lazyscope ${SCENE.name}`, kept = JSON.parse(sessionStorage.getItem(key) || '{"share":1,"playing":false}');
  let frame = Math.round(kept.share * last), timer = null;
  if (last === 0) bar.style.display = "none";
  const button = html("button", { type: "button" }, bar);
  const slide = html("input", { type: "range", min: 0, max: last, "aria-label": "training time" }, bar);
  const told = html("output", {}, bar);
  const keep = () => sessionStorage.setItem(key, JSON.stringify({ share: last ? frame / last : 1, playing: timer !== null }));

  function show(next) {
    frame = next;
    for (const draw of redraws) draw(frame);
    slide.value = frame;
    told.textContent = SCENE.moments[frame];
    keep();
  }
  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => (frame < last ? show(frame + 1) : play(false)), TICK) : null;
    button.textContent = on ? "❚❚ Pause" : "▶ Play";
    keep();
  }
  button.addEventListener("click", () => {
    if (timer === null && frame === last) show(0);
    play(timer === null);
  });
  slide.addEventListener("input", () => { play(false); show(Number(slide.value)); });
  show(frame);
  play(kept.playing && last > 0);

  // Makes the frame that contains this page as tall as the page.
  const fit = () => { if (window.frameElement) window.frameElement.style.height = `${document.body.offsetHeight + 4}px`; };
  new ResizeObserver(fit).observe(document.body);
})();
