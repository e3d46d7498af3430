// A two-layer ReLU net in the plane and its tangent model, trained as by `lazyscope.app.compute.student.teach`.
// A test compares the numbers with those of the library.
"use strict";
const lazyscope = (() => {
  const STEPS = 500, FRAMES = 44, ANGLES = 121;

  // np.unique(np.geomspace(1, steps, count).round()), after 0.
  function logSpaced(steps, count) {
    const found = [0];
    for (let i = 0; i < count; i++) {
      const step = Math.round(steps ** (i / (count - 1)));
      if (step > found[found.length - 1]) found.push(step);
    }
    return found;
  }

  const single = (values) => Float64Array.from(values, Math.fround); // the library draws in float32

  // The circle at every third degree, including both -π and π.
  function circle() {
    const points = new Float64Array(2 * ANGLES);
    for (let i = 0; i < ANGLES; i++) {
      const angle = -Math.PI + (2 * Math.PI * i) / (ANGLES - 1);
      points[2 * i] = Math.cos(angle);
      points[2 * i + 1] = Math.sin(angle);
    }
    return points;
  }
  const CIRCLE = circle();

  // Σ_j a_j max(b_j·x, 0) at the points x, multiplied by `scale`.
  function outputs(a, b, x, scale, y) {
    for (let i = 0; i < y.length; i++) {
      const x0 = x[2 * i], x1 = x[2 * i + 1];
      let sum = 0;
      for (let j = 0; j < a.length; j++) {
        const z = b[2 * j] * x0 + b[2 * j + 1] * x1;
        if (z > 0) sum += a[j] * z;
      }
      y[i] = scale * sum;
    }
    return y;
  }

  // Dh(w₀)v at the points x.
  function tangent(net, v, x, y) {
    const { a, b } = net;
    for (let i = 0; i < y.length; i++) {
      const x0 = x[2 * i], x1 = x[2 * i + 1];
      let sum = 0;
      for (let j = 0; j < a.length; j++) {
        const z = b[2 * j] * x0 + b[2 * j + 1] * x1;
        if (z > 0) sum += v.a[j] * z + a[j] * (v.b[2 * j] * x0 + v.b[2 * j + 1] * x1);
      }
      y[i] = sum;
    }
    return y;
  }

  // The outputs at the samples, which are stored as two lists, with max(b_j·x_i, 0) kept in z[j * n + i].
  function forward(w, first, second, scale, z, y) {
    const { a, b } = w, n = y.length;
    y.fill(0);
    for (let j = 0, at = 0; j < a.length; j++) {
      const aj = scale * a[j], b0 = b[2 * j], b1 = b[2 * j + 1];
      for (let i = 0; i < n; i++, at++) {
        const value = b0 * first[i] + b1 * second[i], kept = value > 0 ? value : 0;
        z[at] = kept;
        y[i] += aj * kept;
      }
    }
  }

  // One step of gradient descent on the loss with the residual r, from what `forward` has kept.
  function descend(w, first, second, z, r, scale) {
    const { a, b } = w, n = r.length;
    for (let j = 0, at = 0; j < a.length; j++) {
      let outer = 0, s0 = 0, s1 = 0;
      for (let i = 0; i < n; i++, at++) {
        const open = z[at] > 0 ? r[i] : 0;
        outer += open * z[at];
        s0 += open * first[i];
        s1 += open * second[i];
      }
      const aj = scale * a[j];
      a[j] += scale * outer;
      b[2 * j] += aj * s0;
      b[2 * j + 1] += aj * s1;
    }
  }

  // The gradient Dhᵀr at w₀, added to `out` with the factor `scale`.
  function pull({ a, b }, x, r, scale, out) {
    for (let j = 0; j < a.length; j++) {
      const b0 = b[2 * j], b1 = b[2 * j + 1];
      let outer = 0, s0 = 0, s1 = 0;
      for (let i = 0; i < r.length; i++) {
        const x0 = x[2 * i], x1 = x[2 * i + 1], z = b0 * x0 + b1 * x1;
        if (z > 0) {
          outer += r[i] * z;
          s0 += r[i] * x0;
          s1 += r[i] * x1;
        }
      }
      out.a[j] += scale * outer;
      out.b[2 * j] += scale * a[j] * s0;
      out.b[2 * j + 1] += scale * a[j] * s1;
    }
  }

  // The tangent kernel K(x, x') = Dh(w₀)(x)·Dh(w₀)(x').
  function kernel(net, x, n) {
    const { a, b } = net, K = new Float64Array(n * n);
    for (let j = 0; j < a.length; j++) {
      for (let i = 0; i < n; i++) {
        const zi = b[2 * j] * x[2 * i] + b[2 * j + 1] * x[2 * i + 1];
        if (zi <= 0) continue;
        for (let k = 0; k < n; k++) {
          const zk = b[2 * j] * x[2 * k] + b[2 * j + 1] * x[2 * k + 1];
          if (zk > 0) K[i * n + k] += zi * zk + a[j] * a[j] * (x[2 * i] * x[2 * k] + x[2 * i + 1] * x[2 * k + 1]);
        }
      }
    }
    return K;
  }

  // The largest eigenvalue, by Jacobi's rotations, which do not need a gap as power iteration does.
  function largestEigenvalue(matrix, n) {
    const A = Float64Array.from(matrix);
    for (let sweep = 0; sweep < 30; sweep++) {
      let off = 0, all = 0;
      for (let i = 0; i < n * n; i++) { all += A[i] * A[i]; if (i % (n + 1)) off += A[i] * A[i]; }
      if (off <= 1e-26 * all) break;
      for (let p = 0; p < n; p++) {
        for (let q = p + 1; q < n; q++) {
          const apq = A[p * n + q];
          if (apq === 0) continue;
          const theta = (A[q * n + q] - A[p * n + p]) / (2 * apq);
          const t = (theta < 0 ? -1 : 1) / (Math.abs(theta) + Math.sqrt(theta * theta + 1));
          const c = 1 / Math.sqrt(t * t + 1), s = t * c;
          for (let k = 0; k < n; k++) {
            const kp = A[k * n + p], kq = A[k * n + q];
            A[k * n + p] = c * kp - s * kq;
            A[k * n + q] = s * kp + c * kq;
          }
          for (let k = 0; k < n; k++) {
            const pk = A[p * n + k], qk = A[q * n + k];
            A[p * n + k] = c * pk - s * qk;
            A[q * n + k] = s * pk + c * qk;
          }
        }
      }
    }
    let top = 0;
    for (let i = 0; i < n; i++) top = Math.max(top, A[i * (n + 1)]);
    return top;
  }

  const meanSquare = (y, target, count) => {
    let sum = 0;
    for (let i = 0; i < count; i++) sum += 0.5 * (y[i] - target[i]) ** 2;
    return sum / count;
  };

  // Sorted by angle, the samples that a neuron sees follow each other, and the processor predicts every `z > 0`.
  function byAngle(x) {
    const pairs = Array.from({ length: x.length / 2 }, (_, i) => [x[2 * i], x[2 * i + 1]]);
    return Float64Array.from(pairs.sort((p, q) => Math.atan2(p[1], p[0]) - Math.atan2(q[1], q[0])).flat());
  }

  // What does not depend on τ: the teacher, the samples, the symmetrised initialisation at τ = 1, and the kernel.
  function problem(draws, { seed, width, samples }) {
    const drawn = draws.seeds[seed], outer = single(drawn.nets[width].a), inner = single(drawn.nets[width].b);
    const net = { a: new Float64Array(2 * outer.length), b: new Float64Array(2 * inner.length) };
    net.a.set(outer);
    net.a.set(outer.map((value) => -value), outer.length);
    net.b.set(inner);
    net.b.set(inner, inner.length);
    const points = single(drawn.points), teacher = { a: single(drawn.signs), b: points.slice(0, 2 * drawn.signs.length) };
    const x = byAngle(points.slice(teacher.b.length, teacher.b.length + 2 * samples));
    const K = kernel(net, x, samples);
    return {
      net, teacher, x, K, n: samples, m: net.a.length,
      y: outputs(teacher.a, teacher.b, x, 1, new Float64Array(samples)),
      target: outputs(teacher.a, teacher.b, CIRCLE, 1, new Float64Array(ANGLES)),
      top: largestEigenvalue(K, samples) / samples,
    };
  }

  // Trains both models at the scale α = τ². In pairs, index 0 is the network and index 1 its tangent model.
  function train(p, tau, steps = STEPS, frames = FRAMES) {
    const alpha = tau * tau, { net, x, y, n, m, K } = p, record = logSpaced(steps, frames);
    const rates = [1.5 / (p.top + p.teacher.a.length / alpha), 1 / p.top];
    const w = { a: Float64Array.from(net.a), b: Float64Array.from(net.b) };
    const out = new Float64Array(n), r = new Float64Array(n), rt = new Float64Array(n), summed = new Float64Array(n);
    const next = new Float64Array(n), z = new Float64Array(m * n);
    const first = x.filter((_, k) => k % 2 === 0), second = x.filter((_, k) => k % 2 === 1);
    for (let i = 0; i < n; i++) rt[i] = -y[i]; // the residual of the tangent model, whose start is 0
    const kept = [];

    function keep() {
      const v = { a: new Float64Array(m), b: new Float64Array(2 * m) };
      pull(net, x, summed, -rates[1] / n, v);
      let tangentLoss = 0;
      for (let i = 0; i < n; i++) tangentLoss += 0.5 * rt[i] * rt[i];
      kept.push({ w: { a: w.a.slice(), b: w.b.slice() }, v, loss: [meanSquare(out, y, n), tangentLoss / n] });
    }

    for (let step = 0, frame = 0; step <= steps; step++) {
      forward(w, first, second, alpha, z, out);
      if (step === record[frame]) { keep(); frame++; }
      if (step === steps) break;
      for (let i = 0; i < n; i++) r[i] = out[i] - y[i];
      descend(w, first, second, z, r, -rates[0] / (n * alpha)); // v' = v - η Dhᵀr/n, and w = w₀ + v/α
      for (let i = 0; i < n; i++) {
        let sum = 0;
        for (let k = 0; k < n; k++) sum += K[i * n + k] * rt[k];
        next[i] = rt[i] - (rates[1] / n) * sum;
      }
      for (let i = 0; i < n; i++) { summed[i] += rt[i]; rt[i] = next[i]; }
    }
    return { steps: record, alpha, frames: kept };
  }

  // What a page shows of one recorded step.
  function look(p, run, frame) {
    const { net, x, n, m } = p, { alpha } = run, { w, v, loss } = run.frames[frame];
    const functions = [new Float64Array(ANGLES), new Float64Array(ANGLES)];
    outputs(w.a, w.b, CIRCLE, alpha, functions[0]);
    tangent(net, v, CIRCLE, functions[1]);
    let moved = 0, size = 0, same = 0;
    for (let j = 0; j < m; j++) {
      moved += (w.a[j] - net.a[j]) ** 2;
      size += net.a[j] ** 2 + net.b[2 * j] ** 2 + net.b[2 * j + 1] ** 2;
      for (let k = 2 * j; k < 2 * j + 2; k++) moved += (w.b[k] - net.b[k]) ** 2;
      for (let i = 0; i < n; i++) {
        const before = net.b[2 * j] * x[2 * i] + net.b[2 * j + 1] * x[2 * i + 1];
        const after = w.b[2 * j] * x[2 * i] + w.b[2 * j + 1] * x[2 * i + 1];
        same += before > 0 === after > 0;
      }
    }
    const test = functions.map((f) => meanSquare(f, p.target, ANGLES - 1)); // -π and π are the same point
    return { loss, test, functions, displacement: Math.sqrt(moved / size), stability: same / (n * m) };
  }

  // The neurons α|a_j|b_j of the network (0) or of the tangent model (1) at one recorded step, and their signs.
  function neurons(p, run, frame, which) {
    const { alpha } = run, { w, v } = run.frames[frame], { net, m } = p;
    const place = new Float64Array(2 * m), signs = new Float64Array(m);
    for (let j = 0; j < m; j++) {
      const a = which ? net.a[j] + v.a[j] / alpha : w.a[j];
      signs[j] = a < 0 ? -1 : 1;
      for (let k = 2 * j; k < 2 * j + 2; k++) {
        place[k] = alpha * Math.abs(a) * (which ? net.b[k] + v.b[k] / alpha : w.b[k]);
      }
    }
    return { place, signs };
  }

  return { problem, train, look, neurons, logSpaced, largestEigenvalue, CIRCLE, ANGLES, STEPS, FRAMES };
})();
