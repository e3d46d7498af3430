"""Max-margin problems of talk 004, each with a dual certificate: the SVM, F₁ (variation norm) and F₂ (kernels)."""

from lazyscope.theory.margin.hilbert import conjugate_kernel, kernel_svm, svm
from lazyscope.theory.margin.result import MaxMargin
from lazyscope.theory.margin.variation import variation_margin

__all__ = ["MaxMargin", "conjugate_kernel", "kernel_svm", "svm", "variation_margin"]
