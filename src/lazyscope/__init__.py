"""lazyscope measures whether a model learns features or follows its linearisation, that is, trains lazily.

The names in `__all__` are the public interface; the modules that define them may change.
"""

from lazyscope import errors, loss, theory
from lazyscope.certify.certificates import certify
from lazyscope.certify.comparison import compare
from lazyscope.diagnose.monitor import Monitor
from lazyscope.flow import (
    Minibatches,
    Status,
    Trajectory,
    gradient_descent,
    gradient_flow,
    log_spaced,
    stochastic_gradient_descent,
    tangent_flow,
)
from lazyscope.flow.conic import conic_descent
from lazyscope.inspect import Report, inspect
from lazyscope.model.base import Model
from lazyscope.model.ensemble import Ensemble
from lazyscope.model.increment import FallbackWarning
from lazyscope.model.parametrise import parametrise
from lazyscope.model.transform import Linearised, Scaled, Symmetrised
from lazyscope.model.two_layer import TwoLayer
from lazyscope.phase import CoordinateCheck, PhaseDiagram, coordinate_check, phases, sweep
from lazyscope.solve.sgd import tangent_sgd
from lazyscope.solve.sparse import solve_sparse
from lazyscope.solve.tangent import TangentSolution, tangent_solve
from lazyscope.tangent import (
    Spectrum,
    TangentOperator,
    kernel_regression,
    layer_spectra,
    limit_kernel,
    limit_kernel_convolution,
    limit_kernel_dense,
    limit_kernel_to_zarr,
    open_tangent_kernel,
    spectrum,
    tangent_kernel,
    tangent_kernel_to_zarr,
)
from lazyscope.theory.criterion import RelativeScale
from lazyscope.theory.relative_scale import KinkWarning, relative_scale

__version__ = "0.2.0"

__all__ = [
    "CoordinateCheck",
    "Ensemble",
    "FallbackWarning",
    "KinkWarning",
    "Linearised",
    "Minibatches",
    "Model",
    "Monitor",
    "PhaseDiagram",
    "RelativeScale",
    "Report",
    "Scaled",
    "Spectrum",
    "Status",
    "Symmetrised",
    "TangentOperator",
    "TangentSolution",
    "Trajectory",
    "TwoLayer",
    "__version__",
    "certify",
    "compare",
    "conic_descent",
    "coordinate_check",
    "errors",
    "gradient_descent",
    "gradient_flow",
    "inspect",
    "kernel_regression",
    "layer_spectra",
    "limit_kernel",
    "limit_kernel_convolution",
    "limit_kernel_dense",
    "limit_kernel_to_zarr",
    "log_spaced",
    "loss",
    "open_tangent_kernel",
    "parametrise",
    "phases",
    "relative_scale",
    "solve_sparse",
    "spectrum",
    "stochastic_gradient_descent",
    "sweep",
    "tangent_flow",
    "tangent_kernel",
    "tangent_kernel_to_zarr",
    "tangent_sgd",
    "tangent_solve",
    "theory",
]
