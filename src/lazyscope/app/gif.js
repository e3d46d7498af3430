// Writes animated GIFs: a palette of the 255 most frequent colours, and in each frame only the pixels that change.
"use strict";
const Gif = (() => {
  const CLEAR = 256, END = 257, SAME = 255; // SAME is the transparent colour of pixels that do not change

  // Collects frames with 5 bits per channel, and the mean of the colours that fall together.
  function start(width, height) {
    const frames = [], counts = new Uint32Array(32768), sums = [0, 1, 2].map(() => new Float64Array(32768));
    return {
      width, height, frames, counts, sums,
      add(rgba, pause) {
        const bins = new Uint16Array(width * height);
        for (let i = 0, p = 0; i < bins.length; i++, p += 4) {
          const bin = ((rgba[p] >> 3) << 10) | ((rgba[p + 1] >> 3) << 5) | (rgba[p + 2] >> 3);
          bins[i] = bin;
          counts[bin]++;
          for (let c = 0; c < 3; c++) sums[c][bin] += rgba[p + c];
        }
        frames.push({ bins, pause });
      },
    };
  }

  function paletteOf({ counts, sums }) {
    const used = [...counts.keys()].filter((bin) => counts[bin]).sort((a, b) => counts[b] - counts[a]);
    const mean = (bin) => sums.map((sum) => Math.round(sum[bin] / counts[bin]));
    const colours = used.slice(0, SAME).map(mean), index = new Uint8Array(32768);
    used.forEach((bin, i) => {
      if (i < SAME) { index[bin] = i; return; }
      const own = mean(bin);
      let best = Infinity;
      colours.forEach((colour, k) => {
        const far = colour.reduce((sum, value, c) => sum + (value - own[c]) ** 2, 0);
        if (far < best) { best = far; index[bin] = k; }
      });
    });
    return { colours, index };
  }

  // Lempel-Ziv-Welch with codes of 9 to 12 bits, in blocks of at most 255 bytes.
  function compressed(pixels) {
    const bytes = [], table = new Int16Array(4096 * 256);
    let held = 0, bits = 0, size = 9, next = END + 1;
    const put = (code) => {
      held |= code << bits;
      for (bits += size; bits >= 8; bits -= 8) { bytes.push(held & 255); held >>>= 8; }
    };
    put(CLEAR);
    let prefix = pixels[0];
    for (let i = 1; i < pixels.length; i++) {
      const at = (prefix << 8) | pixels[i];
      if (table[at]) { prefix = table[at]; continue; }
      put(prefix);
      if (next < 4096) {
        if (next === 1 << size) size++;
        table[at] = next++;
      } else {
        put(CLEAR);
        table.fill(0);
        size = 9;
        next = END + 1;
      }
      prefix = pixels[i];
    }
    put(prefix);
    if (next === 1 << size && size < 12) size++;
    put(END);
    if (bits) bytes.push(held & 255);
    const blocks = [8];
    for (let i = 0; i < bytes.length; i += 255) {
      const part = bytes.slice(i, i + 255);
      blocks.push(part.length);
      for (const byte of part) blocks.push(byte);
    }
    blocks.push(0);
    return Uint8Array.from(blocks);
  }

  function finish(film) {
    const { colours, index } = paletteOf(film), { width, height } = film, pair = (n) => [n & 255, n >> 8];
    const table = Array.from({ length: 256 }, (_, i) => colours[i] || [0, 0, 0]).flat();
    const parts = [Uint8Array.from([..."GIF89a"].map((c) => c.charCodeAt(0))), Uint8Array.from([...pair(width), ...pair(height), 0xf7, 0, 0, ...table])];
    parts.push(Uint8Array.from([0x21, 0xff, 11, ...[..."NETSCAPE2.0"].map((c) => c.charCodeAt(0)), 3, 1, 0, 0, 0]));
    let before = null;
    for (const { bins, pause } of film.frames) {
      const pixels = Uint8Array.from(bins, (bin, i) => (before && before[i] === bin ? SAME : index[bin]));
      parts.push(Uint8Array.from([0x21, 0xf9, 4, 5, ...pair(Math.round(pause / 10)), SAME, 0, 0x2c, 0, 0, 0, 0, ...pair(width), ...pair(height), 0]));
      parts.push(compressed(pixels));
      before = bins;
    }
    parts.push(Uint8Array.from([0x3b]));
    return new Blob(parts, { type: "image/gif" });
  }

  return { start, finish };
})();
