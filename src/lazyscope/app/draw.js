// Draws the panels of a scene (see scene.py) as SVG. Colours and fonts are attributes, so that a panel can be exported.
"use strict";
const Drawing = (() => {
  const NS = "http://www.w3.org/2000/svg", FONT = 'system-ui, "DejaVu Sans", sans-serif';
  const LIGHT = { page: "#ffffff", ink: "#1f2933", soft: "#55606c", axis: "#444444", grid: "#e6e6e6" };
  const DARK = { page: "#16181b", ink: "#edeef0", soft: "#b3b9c1", axis: "#9aa1a9", grid: "#31363c" };
  // The colours of the marks on a dark page; all others stay as they are.
  const NIGHT = {
    "#000000": "#edeef0", black: "#edeef0", "#0072b2": "#5cb8ff", "#d55e00": "#ff8d4a", "#009e73": "#2ec99a", "#cc79a7": "#e6a3c8",
    "#444444": "#c6ccd3", "#222222": "#e3e6ea", "#777777": "#9aa1a9", "#c3cad2": "#474e56", "#9aa5b1": "#6f7985",
    "#004d33": "#c9f5e5", "#00704b": "#99dcc6", "#4cbf99": "#24a37c", "#99dcc6": "#0f7d5c", "#dcebf5": "#16344a", "#f9dfd0": "#4f2c18",
  };
  const dark = () => matchMedia("screen and (prefers-color-scheme: dark)").matches;

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

  function make(tag, attributes, parent, text) {
    const node = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
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

  // Breaks a text into lines of at most this many characters.
  function lines(text, most) {
    const found = [""];
    for (const word of text.split(" ")) {
      const longer = `${found[found.length - 1]} ${word}`.trim();
      if (longer.length <= most) found[found.length - 1] = longer;
      else found.push(word);
    }
    return found;
  }

  // `look` has the colours of the page, the size of a panel, and `type`, the factor by which letters are enlarged.
  function frameOf(panel, svg, look) {
    const W = look.wide, H = look.tall;
    const edge = { left: 38 + 8 * look.type, right: 12, top: 14 + 12 * look.type, bottom: 10 + 26 * look.type };
    const words = (x, y, text, more = {}) => make("text", { x, y, fill: look.soft, "font-family": FONT, "font-size": 11 * look.type, ...more }, svg, text);
    const bare = !panel.x.ticks && !panel.y.ticks;
    let box = { left: bare ? 8 : edge.left, right: W - edge.right, top: edge.top, bottom: H - (bare ? 8 : edge.bottom) };
    const note = panel.note ? lines(panel.note, Math.floor((W - 16) / (5.7 * look.type))) : [];
    if (bare) box.bottom -= 13 * look.type * note.length;
    const room = { ...box };
    if (panel.equal) { // both axes have the same scale, which the smaller side determines
      const wide = panel.x.high - panel.x.low, tall = panel.y.high - panel.y.low;
      const unit = Math.min((box.right - box.left) / wide, (box.bottom - box.top) / tall);
      const slack = box.right - box.left - unit * wide, named = panel.marks.some((mark) => mark.label);
      const middle = (box.left + box.right) / 2 - (named ? 0.3 * slack : 0), centre = (box.top + box.bottom) / 2;
      box = { left: middle - unit * wide / 2, right: middle + unit * wide / 2, top: centre - unit * tall / 2, bottom: centre + unit * tall / 2 };
    }
    const X = scale(panel.x, box.left, box.right), Y = scale(panel.y, box.bottom, box.top);
    words(bare ? 8 : edge.left, 15 * look.type, panel.title, { fill: look.ink, "font-size": Math.min(13 * look.type, (W - 50) / (0.58 * panel.title.length)), "font-weight": 600, class: "title" });
    note.forEach((text, i) => {
      if (bare) words(W / 2, H - 5 - 13 * look.type * (note.length - 1 - i), text, { "text-anchor": "middle" });
      else words(box.right, box.top + (11 + 13 * i) * look.type, text, { "text-anchor": "end" });
    });
    const grid = make("g", {}, svg);
    if (panel.x.ticks) {
      for (const v of ticks(panel.x)) {
        make("line", { x1: X(v), x2: X(v), y1: box.top, y2: box.bottom, stroke: look.grid, "stroke-width": 0.7 }, grid);
        words(X(v), box.bottom + 3 + 11 * look.type, written(v, panel.x.log), { "text-anchor": "middle" });
      }
      make("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, stroke: look.axis }, svg);
      words((box.left + box.right) / 2, box.bottom + 7 + 23 * look.type, panel.x.label, { "text-anchor": "middle" });
    }
    if (panel.y.ticks) {
      for (const v of ticks(panel.y)) {
        make("line", { x1: box.left, x2: box.right, y1: Y(v), y2: Y(v), stroke: look.grid, "stroke-width": 0.7 }, grid);
        words(box.left - 5, Y(v) + 4, written(v, panel.y.log), { "text-anchor": "end" });
      }
      make("line", { x1: box.left, x2: box.left, y1: box.top, y2: box.bottom, stroke: look.axis }, svg);
      const middle = (box.top + box.bottom) / 2;
      if (panel.y.label) words(11, middle, panel.y.label, { "text-anchor": "middle", transform: `rotate(-90 11 ${middle})` });
    }
    const clip = `clip${clips++}`;
    make("rect", { x: box.left - 1, y: box.top - 1, width: box.right - box.left + 2, height: box.bottom - box.top + 2 }, make("clipPath", { id: clip }, svg));
    return { X, Y, box, room, look, words, inside: make("g", { "clip-path": `url(#${clip})` }, svg) };
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
    line(mark, { X, Y, look, inside }) {
      const line = make("path", { fill: "none", stroke: look.tint(mark.colour), "stroke-width": mark.width, "stroke-dasharray": mark.dash, "stroke-linejoin": "round" }, inside);
      const draw = (frame) => { const x = at(mark.x, frame), y = at(mark.y, frame); line.setAttribute("d", path(y.map((v, i) => [X(x[i]), Y(v)]))); };
      draw(0);
      return moving(mark.y) || moving(mark.x) ? draw : null;
    },
    dots(mark, { X, Y, look, inside }) {
      const count = at(mark.x, 0).length, edge = { stroke: look.tint(mark.edge), "stroke-width": 0.7 };
      const nodes = Array.from({ length: count }, (_, i) => make("circle", { fill: look.tint(each(mark.colour, i)), ...edge }, inside));
      const draw = (frame) => {
        const x = at(mark.x, frame), y = at(mark.y, frame), size = at(mark.size, frame);
        nodes.forEach((node, i) => {
          const px = X(x[i]), py = Y(y[i]);
          node.setAttribute("visibility", px === null || py === null ? "hidden" : "visible");
          if (px !== null && py !== null) { node.setAttribute("cx", px.toFixed(1)); node.setAttribute("cy", py.toFixed(1)); }
          node.setAttribute("r", each(size, i));
        });
      };
      draw(0);
      return [mark.x, mark.y, mark.size].some(moving) ? draw : null;
    },
    trails(mark, { X, Y, look, inside }) {
      const count = mark.x[0].length;
      const nodes = Array.from({ length: count }, (_, i) => make("path", { fill: "none", stroke: look.tint(each(mark.colour, i)), "stroke-width": mark.width, opacity: 0.7 }, inside));
      return (frame) => nodes.forEach((node, i) => node.setAttribute("d", path(mark.x.slice(0, frame + 1).map((row, t) => [X(row[i]), Y(mark.y[t][i])]))));
    },
    arrows(mark, { X, Y, look, inside }) {
      mark.x.forEach((x, i) => {
        const [x0, y0, x1, y1] = [X(0), Y(0), X(x), Y(mark.y[i])], turn = Math.atan2(y1 - y0, x1 - x0);
        const wing = (side) => `${x1 - 11 * Math.cos(turn + side)},${y1 - 11 * Math.sin(turn + side)}`;
        make("line", { x1: x0, y1: y0, x2: x1 - 7 * Math.cos(turn), y2: y1 - 7 * Math.sin(turn), stroke: look.tint(each(mark.colour, i)), "stroke-width": 2.4 }, inside);
        make("polygon", { points: `${x1},${y1} ${wing(0.42)} ${wing(-0.42)}`, fill: look.tint(each(mark.colour, i)) }, inside);
      });
    },
    signs(mark, { X, Y, look, inside }) {
      mark.x.forEach((x, i) => {
        const px = X(x), py = Y(mark.y[i]), bar = { stroke: look.tint(each(mark.colour, i)), "stroke-width": 1.7 };
        make("line", { x1: px - 4, x2: px + 4, y1: py, y2: py, ...bar }, inside);
        if (mark.positive[i]) make("line", { x1: px, x2: px, y1: py - 4, y2: py + 4, ...bar }, inside);
      });
    },
    cursor(mark, { X, box, look, inside }) {
      const line = make("line", { y1: box.top, y2: box.bottom, stroke: look.axis, "stroke-width": 1, "stroke-dasharray": "3 3" }, inside);
      return (frame) => { const x = X(mark.x[frame]); line.setAttribute("visibility", x === null ? "hidden" : "visible"); if (x !== null) { line.setAttribute("x1", x); line.setAttribute("x2", x); } };
    },
    regions(mark, { X, Y, look, inside }) {
      const node = make("path", { fill: look.tint(mark.colour), stroke: look.tint(mark.edge), "stroke-width": 1.5, "fill-rule": "evenodd" }, inside);
      return (frame) => node.setAttribute("d", mark.rings[frame].map((ring) => path(ring.map(([x, y]) => [X(x), Y(y)])) + "Z").join(""));
    },
  };

  // Places the legend in the corner where it hides the fewest points.
  function legend(panel, svg, { X, Y, box, room, look, words }, last) {
    const named = panel.marks.filter((mark) => mark.label);
    if (!named.length) return;
    const wide = 24 + 8 * look.type + 6.3 * look.type * Math.max(...named.map((mark) => mark.label.length)), tall = 15 * look.type * named.length + 6;
    const points = panel.marks.filter((mark) => mark.kind === "line" || mark.kind === "dots").flatMap((mark) => {
      const x = at(mark.x, last), y = at(mark.y, last);
      return y.map((v, i) => [X(x[i]), Y(v)]).filter(([px, py]) => px !== null && py !== null);
    });
    const near = panel.equal ? room : box; // beside a square picture there is room on both sides
    const corners = [[near.right - wide, near.top], [near.left + 4, near.top], [near.right - wide, near.bottom - tall], [near.left + 4, near.bottom - tall]];
    const hidden = corners.map(([x, y]) => points.filter(([px, py]) => px > x && px < x + wide && py > y && py < y + tall).length);
    const [x, top] = corners[hidden.indexOf(Math.min(...hidden))];
    make("rect", { x, y: top, width: wide, height: tall, fill: look.page, opacity: 0.85 }, svg);
    named.forEach((mark, i) => {
      const y = top + 10 * look.type + 15 * look.type * i, colour = look.tint(each(mark.colour, 0));
      if (mark.kind === "dots") make("circle", { cx: x + 12, cy: y, r: 3.5, fill: colour, stroke: look.tint(mark.edge) }, svg);
      else if (mark.kind === "regions") make("rect", { x: x + 3, y: y - 5, width: 18, height: 10, fill: colour, stroke: look.tint(mark.edge) }, svg);
      else make("line", { x1: x + 3, x2: x + 21, y1: y, y2: y, stroke: colour, "stroke-width": mark.kind === "arrows" ? 3.2 : 2, "stroke-dasharray": mark.dash || "" }, svg);
      words(x + 26, y + 4, mark.label, { fill: look.ink });
    });
  }

  // Returns the picture of a panel, and the functions that draw a frame of it.
  function draw(panel, look, last) {
    const svg = make("svg", { viewBox: `0 0 ${look.wide} ${look.tall}`, role: "img", "aria-label": panel.note ? `${panel.title}. ${panel.note}` : panel.title });
    const place = frameOf(panel, svg, look), redraws = [];
    for (const mark of panel.marks) { const again = DRAW[mark.kind](mark, place); if (again) redraws.push(again); }
    legend(panel, svg, place, last);
    return { svg, redraws };
  }

  function look(type = 1, wide = 380, tall = 300) {
    const night = dark();
    return { ...(night ? DARK : LIGHT), type, wide, tall, tint: (colour) => (night && colour === "white" ? DARK.page : night && NIGHT[String(colour).toLowerCase()]) || colour };
  }

  return { FONT, make, unpack, draw, look, lines };
})();
