"""Forty small errors, each of which the tests must notice.

    python -m tests.mutants             all of them; prints those that survive, and exits with their number
    python -m tests.mutants "factor 2"  those whose names contain these words

Each error is put into a copy of the sources, one at a time, and the tests that are about that code are run against it.

Longer than 350 lines because it is a table of errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lazyscope"


@final
@dataclass(frozen=True)
class Mutant:
    """One error.

    Attributes:
        name: What is wrong.
        file: The file, within the package.
        old: The text that is replaced, which occurs in it.
        new: What it is replaced by.
        tests: The arguments of pytest that select the tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """The text of the file with the error."""
        if self.old not in text:
            raise LookupError(f"{self.file} does not contain {self.old!r} any more: rewrite the mutant {self.name!r}.")
        return text.replace(self.old, self.new, 1)

    def survives(self, sources: Path) -> bool:
        """Put the error into these sources, run the tests, and take it out again."""
        path = sources / "lazyscope" / self.file
        text = path.read_text(encoding="utf-8")
        path.write_text(self.applied(text), encoding="utf-8")
        try:
            return passed(self.tests, sources)
        finally:
            path.write_text(text, encoding="utf-8")


def passed(tests: str, sources: Path) -> bool:
    """Whether these tests pass with these sources."""
    files, _, chosen = tests.partition(" -k ")
    words = [*files.split(), *(["-k", chosen] if chosen else [])]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "LAZYSCOPE_SLOW": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a test failed; others: no test was run
        raise RuntimeError(f"pytest {' '.join(words)} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def selections(mutants: Sequence[Mutant]) -> list[str]:
    """The tests of all mutants, with one selection for the same files."""
    chosen: dict[str, list[str]] = {}
    for mutant in mutants:
        files, _, words = mutant.tests.partition(" -k ")
        chosen.setdefault(files, []).append(words)
    return [
        files if "" in words else f"{files} -k " + " or ".join(f"({w})" for w in words)
        for files, words in chosen.items()
    ]


RULES = "tests/model/test_rules.py -k "
KERNEL = "tests/tangent/test_kernel.py -k "
BOUNDS = "tests/certify/test_bounds.py"
CONSTANT_RANK = "tests/certify/test_constant_rank.py -k "
RANKED = "theory/constant_rank.py"
LIMIT = "tests/tangent/test_memory_limit.py"
INTEGRITY = "tests/lab/test_integrity.py -k "

MUTANTS = (
    # ── certificates ──
    Mutant("C₁ without its factor 2", "theory/lazy.py", "c1, c2 = 2 * lip", "c1, c2 = lip", BOUNDS),
    Mutant("weights with 1/3 for 2/3", "theory/lazy.py", "t**1.5 * (2 / 3)", "t**1.5 * (1 / 3)", BOUNDS),
    Mutant("gradient bound without M", "theory/lazy.py", "s.slope + m * lip * reach", "s.slope + lip * reach", BOUNDS),
    Mutant("C₂ without M", "theory/lazy.py", "lip**2 * m\n", "lip**2\n", BOUNDS),
    Mutant(
        "unseen points without the half", "theory/lazy.py", "second / 2 * displacement", "second * displacement", BOUNDS
    ),
    Mutant("rank: rate without G", RANKED, "* floor**2 - twist", "* floor**2", CONSTANT_RANK + "half"),
    Mutant("rank: weights without G", RANKED, "steep / s.alpha + loss", "loss", CONSTANT_RANK + "half"),
    Mutant(
        "rank: steps contract by μ alone",
        RANKED,
        "max(abs(1 - self.step * low), abs(1 - self.step * high))",
        "abs(1 - self.step * low)",
        CONSTANT_RANK + "smoothness",
    ),
    Mutant(
        "rank: deficient counts as constant",
        RANKED,
        "(full or constant_rank)",
        "True",
        CONSTANT_RANK + "deficient",
    ),
    Mutant(
        "rank: a quarter of the noise",
        "theory/stochastic.py",
        "noise = 4 * steepest**2",
        "noise = steepest**2",
        CONSTANT_RANK + "noise",
    ),
    Mutant(
        "rank: flips with the radius for its square",
        "theory/flips.py",
        "float(radius) ** 2 * (1",
        "float(radius) * (1",
        CONSTANT_RANK + "flipped",
    ),
    # ── kernels ──
    Mutant(
        "slabs ignore the memory",
        "tangent/gram.py",
        "max(1, limit // (2 * rows * kernel.element_size()))",
        "max(1, 10**6 // rows)",
        LIMIT,
    ),
    Mutant("blocks ignore the memory", "tangent/gram.py", "return min(limit, CACHE) if", "return CACHE if", LIMIT),
    Mutant(
        "pairs without the bias",
        "tangent/gram.py",
        "inputs.add_(1) if bias else inputs",
        "inputs",
        KERNEL + "contraction or agree",
    ),
    Mutant(
        "relay with outputs exchanged",
        "tangent/gram.py",
        "view(rows, k, columns, k).permute(0, 3, 2, 1)",
        "view(rows, k, columns, k).permute(0, 1, 2, 3)",
        KERNEL + "agree",
    ),
    Mutant(
        "lower triangle not mirrored",
        "tangent/assembly.py",
        "kernel[end:, top:end] = kernel[top:end, end:].T",
        "pass",
        LIMIT,
    ),
    Mutant(
        "diagonal counted twice",
        "tangent/assembly.py",
        "corner + corner.triu(1).T",
        "corner + corner.T",
        KERNEL + "contraction",
    ),
    Mutant(
        "padding of an embedding has a gradient",
        "tangent/rule.py",
        "grads = grads * (index != padding)[:, None, :, None]",
        "pass",
        KERNEL + "contraction",
    ),
    Mutant(
        "positions of a shared layer",
        "tangent/outer.py",
        "torch.cat([part.right for part in parts], 3), bias)",
        "sum(part.right for part in parts), bias)",
        KERNEL + "contraction",
    ),
    Mutant(
        "overflow not noticed",
        "linalg/finite.py",
        "not bool(t.isfinite().all())",
        "False",
        "tests/test_numbers.py -k remedy",
    ),
    # ── flows ──
    Mutant(
        "absolute tolerance",
        "flow/tangent.py",
        "converged = speed <= tolerance * length(scales * modes)",
        "converged = speed <= tolerance",
        "tests/flow/test_convergence.py",
    ),
    Mutant(
        "speed not through the kernel",
        "flow/tangent.py",
        "return -gradient, length(gradient)",
        "return -gradient, torch.linalg.vector_norm(gradient, dim=-1)",
        "tests/flow/test_convergence.py",
    ),
    Mutant(
        "absolute tolerance of an ODE",
        "flow/ode.py",
        "self.slow = tolerance * speed",
        "self.slow = tolerance * torch.ones_like(speed)",
        "tests/flow/test_convergence.py",
    ),
    Mutant(
        "half precision stays half",
        "flow/objective.py",
        "if dtypes & set(_HALVES):",
        "if False:",
        "tests/test_numbers.py -k half",
    ),
    # ── linear algebra ──
    Mutant("largest in absolute value", "linalg/eigen.py", 'which="LA"', 'which="LM"', "tests/linalg/test_largest.py"),
    Mutant("coarse Lanczos in float32", "linalg/eigen.py", "else 1e-5", "else 1e-2", "tests/linalg/test_largest.py"),
    # ── increments ──
    Mutant(
        "product without its second-order term",
        "model/increment/product.py",
        "lowered(a.delta, b.base, b.delta, shift, a.current(scale), b.current(scale))",
        "lowered(a.delta, b.base, b.delta, shift, a.base, b.current(scale))",
        RULES + "matrix",
    ),
    Mutant(
        "gradient of a product at the start",
        "model/increment/product.py",
        "ctx.save_for_backward(*inputs[4:])\n        ctx.shift",
        "ctx.save_for_backward(inputs[4], inputs[1])\n        ctx.shift",
        "tests/conformance/test_table.py -k MLP and Scaled",
    ),
    Mutant(
        "ReLU without its kink",
        "model/increment/kink.py",
        "torch.where(a.delta > barrier, a.delta, barrier)",
        "torch.where(a.base > 0, a.delta, barrier)",
        RULES + "relu",
    ),
    Mutant(
        "softmax without its denominator",
        "model/increment/normalise.py",
        "near = out * (growth - total) / (1.0 + scale.epsilon *",
        "near = out * (growth - total) / (1.0 + 0 *",
        RULES + "softmax",
    ),
    Mutant(
        "sigmoid with a cancelled term",
        "model/increment/smooth.py",
        "torch.sigmoid(b) * torch.sigmoid(-a) + torch.sigmoid(a) * torch.sigmoid(-b)",
        "2 * torch.sigmoid(b) * torch.sigmoid(-a)",
        RULES + "sigmoid or tanh",
    ),
    Mutant(
        "derivatives of what is stopped",
        "model/increment/capture.py",
        "            with graph.inserting_after(node):\n                barrier = graph.call_function(stop, (node,))",
        "            continue",
        "tests/model/test_rules.py tests/conformance/test_table.py -k masked_fill or stop or detach",
    ),
    Mutant(
        "guards are not checked",
        "model/increment/capture.py",
        "return all(_same(a, b) for a, b in zip(found, self.expected, strict=True))",
        "return True",
        "tests/conformance/test_table.py -k Branch",
    ),
    # ── threads and global state ──
    Mutant(
        "one module for all threads",
        "model/forward.py",
        "functional_call(self.own,",
        "functional_call(self.net,",
        "tests/test_threads.py -k one_model",
    ),
    Mutant(
        "settings restored by the first",
        "ambient.py",
        "self._users += 1",
        "self._users = 1",
        "tests/test_threads.py -k restored",
    ),
    Mutant(
        "forward mode without a lock",
        "model/jacobian.py",
        "with forward_mode, torch.no_grad():",
        "with torch.no_grad():",
        "tests/test_threads.py -k second_derivatives",
    ),
    # ── the lab ──
    Mutant(
        "write not atomic",
        "lab/disk.py",
        'temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")',
        "temporary = path",
        "tests/lab/test_disk.py",
    ),
    Mutant("fsync removed", "lab/disk.py", "os.fsync(file.fileno())", "pass", "tests/lab/test_disk.py"),
    Mutant(
        "KeyError and TypeError not caught on read",
        "lab/store.py",
        "except Exception as error:",
        "except (EOFError, ValueError, OSError) as error:",
        INTEGRITY + "metadata",
    ),
    Mutant(
        "NumPy scalars not restored",
        "lab/store.py",
        "if np.isscalar(value)]",
        "if isinstance(value, int | float | str)]",
        INTEGRITY + "scalars",
    ),
    Mutant(
        "StoreError does not stop the sweep",
        "lab/run.py",
        "if isinstance(error, StoreError):",
        "if False:",
        "tests/lab/test_isolation.py -k sweep",
    ),
    Mutant(
        "report without escaping",
        "lab/report.py",
        "autoescape=True",
        "autoescape=False",
        "tests/lab/test_isolation.py -k markup",
    ),
    Mutant(
        "trial under another name",
        "lab/store.py",
        "!= json.dumps(asked, sort_keys=True)",
        "== None",
        INTEGRITY + "copied or metadata",
    ),
    Mutant(
        "checksum of a trial",
        "lab/seal.py",
        "if hashlib.sha256(covered).hexdigest().encode() != found:",
        "if False:",
        INTEGRITY + "flipped_bit_of_a_trial",
    ),
    Mutant(
        "checksum of a checkpoint",
        "flow/checkpoint.py",
        "if digest.hexdigest().encode() != found:",
        "if False:",
        INTEGRITY + "flipped_bit_of_a_checkpoint",
    ),
    Mutant(
        "imports of the package itself",
        "lab/definitions.py",
        '"." * node.level + (node.module or "")',
        '(node.module or "")',
        "tests/lab/test_fingerprints.py -k imports",
    ),
    Mutant(
        "chunks never shrink",
        "lab/run.py",
        "len(lost) // 2 if first else len(lost)",
        "len(lost)",
        "tests/lab/test_lives.py -k shrink",
    ),
    Mutant(
        "members of an archive of any size",
        "data/archive.py",
        "if size > LARGEST:",
        "if False:",
        "tests/data/test_strangers.py -k larger_than or long_names",
    ),
)


def survivors(mutants: Sequence[Mutant] = MUTANTS) -> Iterator[Mutant]:
    """Run the mutants one by one, and yield those that no test noticed."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(PACKAGE, sources / "lazyscope", ignore=shutil.ignore_patterns("__pycache__"))
        failing = [tests for tests in selections(mutants) if not passed(tests, sources)]
        if failing:
            raise RuntimeError(f"These tests fail without any mutant, and would notice nothing: {failing}")
        for mutant in mutants:
            if mutant.survives(sources):
                yield mutant
            else:
                print(f"died      {mutant.name}", flush=True)


def main(words: Sequence[str]) -> int:
    """Run those whose names contain one of the words, or all, and print the survivors."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    found = 0
    for mutant in survivors(chosen):
        found += 1
        print(f"SURVIVED  {mutant.name} ({mutant.file})", flush=True)
    print(f"{found} of {len(chosen)} survived")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
