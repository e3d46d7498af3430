// The controls and the pictures of the page. `lazyscope` computes, `DRAWS` holds the random numbers of the library.
"use strict";
(() => {
  const LOW = 0.05, HIGH = 4, NOTCHES = 200, TICK = 45;
  const $ = (id) => document.getElementById(id);
  const state = { tau: 0.1, width: 20, samples: 15, seed: 9, frame: Infinity };
  const OPTIONS = { width: DRAWS.widths, samples: DRAWS.samples, seed: Object.keys(DRAWS.seeds).map(Number) };
  let problem = null, run = null, sweep = [], timer = null, wanted = { problem: true, run: true };

  const tauAt = (notch) => LOW * (HIGH / LOW) ** (notch / NOTCHES);
  const notchOf = (tau) => Math.round(NOTCHES * Math.log(tau / LOW) / Math.log(HIGH / LOW));
  let now = null, ended = null; // what `lazyscope.look` says of the shown and of the last step
  const last = () => (run ? run.steps.length - 1 : 0);
  const frameNow = () => Math.min(state.frame, last());

  // The link holds every setting; anything that is not offered is left out.
  function readLink() {
    const link = new URLSearchParams(location.hash.slice(1));
    const tau = Number(link.get("tau"));
    if (tau >= LOW && tau <= HIGH) state.tau = tau;
    for (const name of ["width", "samples", "seed"]) {
      const value = Number(link.get(name));
      if (link.has(name) && OPTIONS[name].includes(value)) state[name] = value;
    }
    const frame = Number(link.get("frame"));
    state.frame = link.has("frame") && Number.isInteger(frame) && frame >= 0 ? frame : Infinity;
    wanted.problem = wanted.run = true;
  }
  function writeLink() {
    const link = new URLSearchParams({ tau: Number(state.tau.toPrecision(4)), width: state.width, samples: state.samples, seed: state.seed });
    if (frameNow() < last()) link.set("frame", frameNow());
    history.replaceState(null, "", `#${link}`);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  let palette = {};
  function readPalette() {
    for (const name of ["ink", "soft", "line", "card", "red", "blue", "tangent", "grid", "teacher"]) palette[name] = colour(name);
  }

  // Returns a context in CSS pixels, and the size of the canvas.
  function paper(id) {
    const canvas = $(id), ratio = window.devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight;
    if (canvas.width !== Math.round(w * ratio) || canvas.height !== Math.round(h * ratio)) {
      canvas.width = Math.round(w * ratio);
      canvas.height = Math.round(h * ratio);
    }
    const g = canvas.getContext("2d");
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, w, h);
    g.font = "12px system-ui, sans-serif";
    return { g, w, h };
  }

  // The radius in the picture: linear up to the unit circle, logarithmic beyond it.
  const bend = (r) => (r <= 1 ? r : 1 + 0.4 * Math.log(r));
  const REACH = bend(20);

  function drawNeurons(id, which) {
    const { g, w, h } = paper(id), unit = Math.min(w, h) / (2 * REACH), frame = frameNow();
    const X = (x, y) => { const r = Math.hypot(x, y), s = r ? (unit * bend(r)) / r : 0; return [w / 2 + s * x, h / 2 - s * y]; };
    g.strokeStyle = palette.grid;
    g.fillStyle = palette.soft;
    for (const ring of [1, 4, 16]) {
      g.setLineDash(ring === 1 ? [] : [2, 4]);
      g.lineWidth = 1;
      g.beginPath();
      g.arc(w / 2, h / 2, unit * bend(ring), 0, 2 * Math.PI);
      g.stroke();
      g.fillText(String(ring), w / 2 + 3, h / 2 - unit * bend(ring) + 12);
    }
    g.setLineDash([]);
    const teacher = problem.teacher;
    for (let k = 0; k < teacher.a.length; k++) {
      const [x1, y1] = X(teacher.b[2 * k], teacher.b[2 * k + 1]), turn = Math.atan2(y1 - h / 2, x1 - w / 2);
      g.strokeStyle = g.fillStyle = teacher.a[k] > 0 ? palette.red : palette.blue;
      g.lineWidth = 3;
      g.beginPath();
      g.moveTo(w / 2, h / 2);
      g.lineTo(x1 - 6 * Math.cos(turn), y1 - 6 * Math.sin(turn));
      g.stroke();
      g.beginPath();
      g.moveTo(x1, y1);
      for (const side of [0.4, -0.4]) g.lineTo(x1 - 12 * Math.cos(turn + side), y1 - 12 * Math.sin(turn + side));
      g.fill();
    }
    const size = Math.max(2.2, Math.min(4.2, w / 75)), { signs } = lazyscope.neurons(problem, run, last(), which);
    const places = run.steps.slice(0, frame + 1).map((_, t) => lazyscope.neurons(problem, run, t, which).place);
    for (let j = 0; j < problem.m; j++) {
      g.strokeStyle = g.fillStyle = signs[j] > 0 ? palette.red : palette.blue;
      g.globalAlpha = 0.45;
      g.lineWidth = 1.3;
      g.beginPath();
      for (const place of places) g.lineTo(...X(place[2 * j], place[2 * j + 1]));
      g.stroke();
      g.globalAlpha = 1;
      g.beginPath();
      g.arc(...X(places[frame][2 * j], places[frame][2 * j + 1]), size, 0, 2 * Math.PI);
      g.fill();
      g.strokeStyle = palette.card;
      g.lineWidth = 1;
      g.stroke();
    }
  }

  const EDGE = { left: 34, right: 8, top: 10, bottom: 34 };
  function axes(id, [x0, x1], [y0, y1], ticksX, ticksY, label) {
    const { g, w, h } = paper(id);
    const X = (v) => EDGE.left + ((v - x0) / (x1 - x0)) * (w - EDGE.left - EDGE.right);
    const Y = (v) => h - EDGE.bottom - ((v - y0) / (y1 - y0)) * (h - EDGE.top - EDGE.bottom);
    g.strokeStyle = palette.line;
    g.fillStyle = palette.soft;
    g.lineWidth = 1;
    for (const [v, text] of ticksX) {
      g.textAlign = "center";
      g.fillText(text, X(v), h - EDGE.bottom + 14);
      g.beginPath(); g.moveTo(X(v), EDGE.top); g.lineTo(X(v), h - EDGE.bottom); g.stroke();
    }
    for (const [v, text] of ticksY) {
      g.textAlign = "right";
      g.fillText(text, EDGE.left - 4, Y(v) + 4);
      g.beginPath(); g.moveTo(EDGE.left, Y(v)); g.lineTo(w - EDGE.right, Y(v)); g.stroke();
    }
    g.textAlign = "center";
    g.fillText(label, (EDGE.left + w - EDGE.right) / 2, h - 5);
    g.textAlign = "left";
    return { g, w, h, X, Y };
  }
  function line(g, points, ink, width, dash = []) {
    g.strokeStyle = ink;
    g.lineWidth = width;
    g.setLineDash(dash);
    g.beginPath();
    for (const [x, y] of points) g.lineTo(x, y);
    g.stroke();
    g.setLineDash([]);
  }

  function drawFunction() {
    let reach = 1;
    for (const value of problem.target) reach = Math.max(reach, 1.4 * Math.abs(value));
    const ticks = [-1, 0, 1].map((v) => [v, String(v).replace("-", "−")]);
    const angles = [-180, -90, 0, 90, 180].map((v) => [v, `${String(v).replace("-", "−")}°`]);
    const { g, w, h, X, Y } = axes("function", [-180, 180], [-reach, reach], angles, ticks, "angle of x");
    g.save();
    g.beginPath();
    g.rect(EDGE.left, EDGE.top, w - EDGE.left - EDGE.right, h - EDGE.top - EDGE.bottom);
    g.clip();
    const at = (f) => Array.from(f, (value, i) => [X(-180 + 3 * i), Y(value)]);
    line(g, at(problem.target), palette.grid, 5);
    line(g, at(now.functions[1]), palette.tangent, 2);
    line(g, at(now.functions[0]), palette.blue, 2);
    g.restore();
    g.fillStyle = palette.ink;
    for (let i = 0; i < problem.n; i++) {
      g.beginPath();
      g.arc(X((Math.atan2(problem.x[2 * i + 1], problem.x[2 * i]) * 180) / Math.PI), Y(problem.y[i]), 3, 0, 2 * Math.PI);
      g.fill();
    }
  }

  function drawSweep() {
    const log = Math.log10, low = -4.5, high = 0.5;
    const narrow = $("sweep").clientWidth < 260;
    const taus = (narrow ? [0.1, 0.5, 2] : [0.05, 0.1, 0.2, 0.5, 1, 2, 4]).map((v) => [log(v), String(v)]);
    const losses = [[-4, "10⁻⁴"], [-3, "10⁻³"], [-2, "0.01"], [-1, "0.1"], [0, "1"]];
    const { g, h, X, Y } = axes("sweep", [log(LOW), log(HIGH)], [low, high], taus, losses, "τ");
    const clip = (v) => Math.max(low, Math.min(high, log(v)));
    line(g, [[X(log(state.tau)), EDGE.top], [X(log(state.tau)), h - EDGE.bottom]], palette.soft, 1.5, [4, 4]);
    for (const [which, ink] of [[1, palette.tangent], [0, palette.blue]]) {
      line(g, sweep.map(({ tau, test }) => [X(log(tau)), Y(clip(test[which]))]), ink, 2);
      g.fillStyle = ink;
      g.beginPath();
      g.arc(X(log(state.tau)), Y(clip(ended.test[which])), 4.5, 0, 2 * Math.PI);
      g.fill();
    }
  }

  const raised = (text) => text.replace(/[-\d]/g, (c) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(c)]);
  function digits(v) {
    if (!Number.isFinite(v)) return "diverged";
    const [head, power] = v.toExponential(1).split("e");
    return v !== 0 && Math.abs(v) < 1e-3 ? `${head}·10${raised(power)}` : String(Number(v.toPrecision(2)));
  }
  // As `compared` in lazyscope/app/finding.py.
  function finding([net, twin]) {
    const start = `After ${lazyscope.STEPS} steps, `, both = `test loss ${digits(net)} for the network, ${digits(twin)} for the tangent model.`;
    if (!Number.isFinite(net) || !Number.isFinite(twin)) return `${start}${both}`;
    if (Math.max(net, twin) <= 1.25 * Math.min(net, twin)) return `${start}both generalise about equally well: ${both}`;
    return `${start}the ${net < twin ? "network" : "tangent model"} generalises better: ${both}`;
  }
  function tell() {
    const t = frameNow();
    $("finding").textContent = finding(ended.test);
    $("tau").value = notchOf(state.tau);
    $("tau").setAttribute("aria-valuetext", `τ = ${state.tau.toPrecision(2)}`);
    $("tau-value").textContent = `τ = ${state.tau.toPrecision(2)}`;
    $("time").max = last();
    $("time").value = t;
    $("time").setAttribute("aria-valuetext", `step ${run.steps[t]}`);
    $("step-value").textContent = `step ${run.steps[t]}`;
    $("net-test").textContent = digits(now.test[0]);
    $("tangent-test").textContent = digits(now.test[1]);
    $("moved").textContent = `${digits(100 * now.displacement)} %`;
    $("stable").textContent = `${(100 * now.stability).toFixed(0)} %`;
    for (const name of ["width", "samples", "seed"]) $(name).value = state[name];
    const words = `Test loss ${digits(now.test[0])} for the network, ${digits(now.test[1])} for its tangent model.`;
    $("net").setAttribute("aria-label", `Neurons of the network at step ${run.steps[t]}. ${words}`);
    $("twin").setAttribute("aria-label", `Neurons of the tangent model at step ${run.steps[t]}.`);
    $("function").setAttribute("aria-label", `The functions of the teacher, the network and the tangent model on the circle. ${words}`);
    $("sweep").setAttribute("aria-label", `Test loss of both models after training against τ. At τ = ${state.tau.toPrecision(2)}: ${digits(ended.test[0])} and ${digits(ended.test[1])}.`);
  }

  let asked = false;
  function redraw() {
    if (!asked) { asked = true; requestAnimationFrame(paint); }
  }
  function paint() {
    asked = false;
    const began = performance.now();
    if (wanted.problem) {
      problem = lazyscope.problem(DRAWS, state);
      sweep = [];
      wanted.run = true;
    }
    if (wanted.run) {
      run = lazyscope.train(problem, state.tau);
      ended = lazyscope.look(problem, run, last());
    }
    now = frameNow() === last() ? ended : lazyscope.look(problem, run, frameNow());
    wanted = { problem: false, run: false };
    drawNeurons("net", 0);
    drawNeurons("twin", 1);
    drawFunction();
    drawSweep();
    tell();
    play.cost = performance.now() - began; // milliseconds for one frame
    if (sweep.length <= 40) setTimeout(widen, 0);
  }
  // Adds one τ to the curve of all τ, between two frames.
  function widen() {
    if (wanted.problem || sweep.length > 40 || asked) return;
    const tau = tauAt((NOTCHES * sweep.length) / 40), found = lazyscope.train(problem, tau, lazyscope.STEPS, 2);
    sweep.push({ tau, test: lazyscope.look(problem, found, found.steps.length - 1).test });
    redraw();
  }

  function play(on) {
    clearInterval(timer);
    timer = on ? setInterval(() => { if (frameNow() < last()) { state.frame = frameNow() + 1; redraw(); } else { state.frame = Infinity; play(false); } }, TICK) : null;
    $("play").textContent = on ? "❚❚ Pause" : "▶ Play";
    if (!on) writeLink();
  }
  function setTau(tau) { state.tau = tau; wanted.run = true; redraw(); }

  for (const name of ["width", "samples", "seed"]) {
    for (const value of OPTIONS[name]) $(name).add(new Option(String(value), String(value)));
    $(name).addEventListener("change", () => { state[name] = Number($(name).value); wanted.problem = true; redraw(); writeLink(); });
  }
  $("tau").max = NOTCHES;
  $("tau").addEventListener("input", () => setTau(Number(tauAt(Number($("tau").value)).toPrecision(3))));
  $("tau").addEventListener("change", writeLink);
  $("time").addEventListener("input", () => { play(false); state.frame = Number($("time").value) < last() ? Number($("time").value) : Infinity; redraw(); });
  $("time").addEventListener("change", writeLink);
  $("play").addEventListener("click", () => { if (timer === null && frameNow() === last()) state.frame = 0; play(timer === null); redraw(); });
  for (const button of document.querySelectorAll("[data-tau]")) button.addEventListener("click", () => { setTau(Number(button.dataset.tau)); writeLink(); });
  $("link").addEventListener("click", async () => {
    writeLink();
    try { await navigator.clipboard.writeText(location.href); $("told").textContent = "The link is on the clipboard."; }
    catch { $("told").textContent = "Copy the address of this page: it holds the settings."; }
  });
  addEventListener("hashchange", () => { readLink(); redraw(); });
  addEventListener("resize", redraw);
  matchMedia("screen and (prefers-color-scheme: dark)").addEventListener("change", () => { readPalette(); redraw(); });
  readPalette();
  readLink();
  paint();
  window.lazyscopePlay = { state, cost: () => play.cost };
})();
