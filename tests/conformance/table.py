"""The table of models and entry points, which states for each pair whether it is exact or refused.

A row is exact to its tolerance in every entry point that `refused` does not list. An entry point that refuses a model
raises an error of `lazyscope.errors` whose message matches the pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

import torch
from tests.conformance import (
    coupled,
    equations,
    fourier,
    huggingface,
    layers,
    ordinary,
    requests,
    routing,
    situations,
    stops,
    wrapped,
)
from tests.conformance.entries import ENTRIES
from tests.conformance.subject import Subject

EXACT = 1e-10
"""The relative error of a result that is exact up to float64 rounding."""

SINGLE = 1e-5
"""The relative error for a model that computes in float32 inside."""


ALL = frozenset(ENTRIES)
CORE = frozenset({"Model", "Scaled", "Linearised", "tangent_kernel"})
NEVER: frozenset[str] = frozenset()
"""The sets of entry points that an ordinary test run checks for a row: all of them, the most important ones, or none
(for variants of models that take seconds to trace). With LAZYSCOPE_SLOW=1 every cell is checked."""


@dataclass(frozen=True)
class Row:
    """One model. `refused` maps entry points to the pattern of the error. `often` names those that every run checks."""

    family: str
    name: str
    draw: Callable[[], Subject]
    tolerance: float = EXACT
    refused: Mapping[str, str] = field(default_factory=dict)
    often: Set[str] = CORE

    def make(self) -> Subject:
        """Build the model and its inputs. The result is equal for every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.draw()


@dataclass(frozen=True)
class Situation:
    """A test that is not a pair of a model and an entry point. `refused` is the pattern of its error, or None."""

    entry: str
    name: str
    happen: Callable[[], None]
    refused: str | None = None


def everywhere(pattern: str, *but: str) -> dict[str, str]:
    """Return the patterns of a model that every entry point except these refuses."""
    return {entry: pattern for entry in ENTRIES if entry not in but}


_COUPLED = "depends on the other samples"
_MOVES = everywhere(f"moves with the parameters|{_COUPLED}", "Model")
_NO_KERNEL = dict.fromkeys(("tangent_kernel", "by_layer", "spectrum"), _COUPLED)
_NO_BATCHES = {**_NO_KERNEL, **dict.fromkeys(("TangentOperator", "relative_scale", "inspect"), _COUPLED)}
_BACKWARD = everywhere(r"autograd\.Function|backward", "Model")

TABLE: list[Row] = [
    Row("Ordinary models", "MLP", ordinary.perceptron),
    Row("Ordinary models", "MLP with ReLU", ordinary.relu, often=ALL),
    Row("Ordinary models", "Convolution, batch-norm, pooling", ordinary.convolutional),
    Row("Ordinary models", "Attention with layer-norm", ordinary.attention),
    Row("Ordinary models", "`Model(f, params)`, a simulation", ordinary.function),
    Row("Ordinary models", "Tied weights, integer inputs", ordinary.tied),
    Row("Ordinary models", "Equilibrium model, fixed loop", ordinary.equilibrium),
    Row("Inputs and outputs", "Tuple of inputs", ordinary.tuple_inputs),
    Row("Inputs and outputs", "Dict of inputs", ordinary.dict_inputs),
    Row("Inputs and outputs", "Dict with constants", ordinary.constants, often=ALL),
    Row("Inputs and outputs", '`output="logits"`', ordinary.output_field),
    Row("Inputs and outputs", "`output=lambda o: …`", ordinary.output_function, often=ALL),
    Row("Inputs and outputs", "Branch on a mask", ordinary.input_branch, often=ALL),
    Row("Inputs and outputs", "Branch on a count over the batch", ordinary.batch_branch, refused=_NO_KERNEL),
    Row(
        "Inputs and outputs",
        "Branch on a value that moves",
        ordinary.value_branch,
        refused=everywhere(r"branch", "Model"),
    ),
    Row("Recurrent", "LSTM", ordinary.lstm),
    Row("Recurrent", "Bidirectional LSTM", ordinary.bilstm),
    Row("Recurrent", "GRU", ordinary.gru),
    Row("Recurrent", "Packed LSTM, sorted", ordinary.packed_sorted),
    Row("Recurrent", "Packed LSTM, any order", ordinary.packed_unsorted),
    Row("Complex numbers", "`irfft(rfft(Wx) * w)`", fourier.real_filter, often=ALL),
    Row("Complex numbers", "Fourier neural operator", fourier.neural_operator),
    Row("Complex numbers", "`view_as_complex`, `polar`", fourier.rotary, often=ALL),
    Row("Complex numbers", "`abs`, `angle`, `real`, `imag`", fourier.magnitude),
    Row("Complex numbers", "Complex parameters, as pairs of reals", fourier.complex_parameters),
    Row("Complex numbers", "Complex output", fourier.complex_output, refused=everywhere("complex")),
    Row("Complex numbers", "Complex output, `output=torch.view_as_real`", fourier.complex_output_chosen),
    Row("Routing", "`topk` gate", routing.topk, often=ALL),
    Row("Routing", "`argmax` gate", routing.argmax),
    Row("Routing", "`argmin`, `gather`", routing.argmin),
    Row("Routing", "`sort`", routing.sort),
    Row("Routing", "`argsort`", routing.argsort),
    Row("Routing", "`h[h > 0]`", routing.boolean),
    Row("Routing", "`nonzero`, `index_add`", routing.nonzero),
    Row("Routing", "`unique`", routing.unique),
    Row("Routing", "`one_hot(argmax)`", routing.one_hot),
    Row("Routing", "`where`, `masked_fill`", routing.where),
    Row("Routing", "`sign`, `round`", routing.sign),
    Row("Routing", "`max`, `amin`, `maximum`", routing.maximum),
    Row("Routing", "`kthvalue`, `median`", routing.kthvalue),
    Row("Routing", "`bucketize`", routing.bucketize),
    Row("Routing", "`relu(h) > 0`, `remainder`, `frac`", routing.live, often=ALL),
    Row("Routing", "Mixture of experts, `topk` and `gather`", routing.experts_dense),
    Row("Routing", "Mixture of experts, dispatched", routing.experts_dispatched, often=ALL),
    Row("Samples that depend on each other", "`y - y.mean(0)`", coupled.centred, refused=_NO_KERNEL),
    Row(
        "Samples that depend on each other",
        "`y - y.mean(0)`, n above the batch",
        coupled.centred_many,
        refused=_NO_BATCHES,
    ),
    Row("Samples that depend on each other", "Coupling that is zero at w₀", coupled.gated, refused=_NO_KERNEL),
    Row(
        "Samples that depend on each other",
        "Coupling that is zero at w₀, n above the batch",
        coupled.gated_many,
        refused=_NO_BATCHES,
        often=ALL,
    ),
    Row("Samples that depend on each other", "Batch statistics", coupled.batch_norm, refused=_NO_KERNEL),
    Row("Samples that depend on each other", "Graph network, edges in a buffer", coupled.graph_buffer),
    Row("Samples that depend on each other", "Graph network, edges as input", coupled.graph_input, often=ALL),
    Row("Samples that depend on each other", "Graph network, sparse adjacency", coupled.sparse_adjacency),
    Row("Stop-gradients", "`.detach()`", stops.detach),
    Row("Stop-gradients", "`no_grad()`", stops.no_grad, often=ALL),
    Row("Stop-gradients", "`set_grad_enabled(False)`", stops.set_grad_enabled),
    Row("Stop-gradients", "`.data`", stops.data),
    Row("Stop-gradients", "`requires_grad_(False)` on a value", stops.requires_grad_false),
    Row("Stop-gradients", "Frozen layer", stops.frozen_layer),
    Row("Stop-gradients", "Straight-through estimator", stops.straight_through, often=ALL),
    Row("Stop-gradients", "`autograd.Function`, true backward", stops.true_function),
    Row("Stop-gradients", "`autograd.Function`, another backward", stops.false_function, refused=_BACKWARD),
    Row("Values that leave torch", "`.numpy()` of a value that moves", stops.moved_numpy, refused=_MOVES),
    Row("Values that leave torch", "`.item()` of a value that moves", stops.moved_item, refused=_MOVES),
    Row("Values that leave torch", "`.tolist()` of a value that moves", stops.moved_tolist, refused=_MOVES),
    Row("Values that leave torch", "`float()` of a value that moves", stops.moved_float, refused=_MOVES),
    Row("Values that leave torch", "`.numpy()` of an input", stops.input_numpy),
    Row("Values that leave torch", "`.tolist()` of an input", stops.input_tolist),
    Row("Values that leave torch", "`.item()` of an input", stops.input_item, refused=_NO_KERNEL),
    Row("Equations in the forward", "torchdiffeq `rk4`, fixed step", equations.ode_fixed),
    Row(
        "Equations in the forward",
        "torchdiffeq `dopri5`",
        equations.ode_adaptive,
        refused=everywhere("fixed step", "Model"),
    ),
    Row("Equations in the forward", "torchdiffeq `odeint_adjoint`", equations.ode_adjoint, refused=_BACKWARD),
    Row("Equations in the forward", "`autograd.grad` in the forward (PINN)", equations.physics_informed),
    Row(
        "Equations in the forward",
        "`x.requires_grad_()` in the forward (PINN)",
        equations.physics_informed_bare,
        often=ALL,
    ),
    Row("Equations in the forward", "The slope of a ReLU network (PINN)", equations.slope_of_relus, often=ALL),
    Row("Equations in the forward", "`torch.func.hessian` in the forward", equations.laplacian),
    Row("Equations in the forward", "`torch.func.grad` in the forward", equations.energy),
    Row("Layers", "EmbeddingBag", layers.embedding_bag, often=ALL),
    Row("Layers", "Embedding(sparse=True)", layers.sparse_embedding),
    Row("Layers", "`parametrizations.weight_norm`", layers.weight_norm, often=ALL),
    Row("Layers", "`nn.utils.weight_norm` (hook)", layers.weight_norm_hook, refused=everywhere("parametrizations")),
    Row("Layers", "`parametrizations.spectral_norm`", layers.spectral_norm),
    Row("Layers", "`parametrizations.orthogonal`", layers.orthogonal),
    Row("Layers", "`linalg.solve`", layers.solve),
    Row("Layers", "`linalg.eigvalsh`", layers.eigvalsh),
    Row("Layers", "`linalg.eigh`, eigenvectors", layers.eigh, tolerance=1e-9),
    Row("Layers", "`linalg.svdvals`", layers.svd),
    Row("Layers", "`linalg.cholesky`", layers.cholesky),
    Row("Layers", "`linalg.inv`", layers.inverse),
    Row("Layers", "`linalg.det`, `logdet`", layers.determinant),
    Row("Layers", "Sparse CSR parameter", coupled.sparse_weight, refused=everywhere("sparse")),
    Row("Wrappers", "`torch.compile(net)`", wrapped.compiled, often=CORE),
    Row("Wrappers", "`torch.jit.script(net)`", wrapped.scripted, refused=everywhere("ScriptModule")),
    Row("Hugging Face", "BERT", huggingface.bert, often=NEVER),
    Row("Hugging Face", "BERT, padded", partial(huggingface.bert, True), often=CORE),
    Row("Hugging Face", "RoBERTa", huggingface.roberta, often=NEVER),
    Row("Hugging Face", "RoBERTa, padded", partial(huggingface.roberta, True), often=NEVER),
    Row("Hugging Face", "DistilBERT", huggingface.distilbert, often=NEVER),
    Row("Hugging Face", "DistilBERT, padded", partial(huggingface.distilbert, True), often=NEVER),
    Row("Hugging Face", "GPT-2", huggingface.gpt2, often=NEVER),
    Row("Hugging Face", "GPT-2, padded", partial(huggingface.gpt2, True), often=NEVER),
    Row("Hugging Face", "GPT-2 with its cache", huggingface.gpt2_cached, often=NEVER),
    Row("Hugging Face", "GPT-2, logits of every token", huggingface.gpt2_every_token, often=NEVER),
    Row("Hugging Face", "GPT-2 for sequence classification", huggingface.gpt2_classifier, often=CORE),
    Row("Hugging Face", "GPT-2 with LoRA (PEFT)", huggingface.lora, often=CORE),
    Row("Hugging Face", "GPT-2 with LoRA (PEFT), padded", partial(huggingface.lora, True), often=NEVER),
    Row("Hugging Face", "Llama", huggingface.llama, SINGLE, often=NEVER),
    Row("Hugging Face", "Llama, padded", partial(huggingface.llama, True), SINGLE, often=CORE),
    Row("Hugging Face", "T5", huggingface.t5, SINGLE, often=NEVER),
    Row("Hugging Face", "T5, padded", partial(huggingface.t5, True), SINGLE, often=CORE),
    Row("Hugging Face", "Mixtral", huggingface.mixtral, SINGLE, often=CORE),
    Row("Hugging Face", "Mixtral, padded", partial(huggingface.mixtral, True), SINGLE, often=NEVER),
    Row("Hugging Face", "Mixtral, grouped products in float32", huggingface.mixtral_grouped, 1e-3, often=NEVER),
    Row("Hugging Face", "ViT", huggingface.vit, often=NEVER),
    Row("Hugging Face", "ResNet", huggingface.resnet, often=NEVER),
    Row("Hugging Face", "Mamba", huggingface.mamba, SINGLE, often=NEVER),
]

SITUATIONS: list[Situation] = [
    Situation("Monitor", "A layer that is unfrozen after the monitor was made", situations.unfrozen_later),
    Situation("Monitor", "Called inside of autocast", situations.inside_autocast),
    Situation("Monitor", "Around `Scaled(net, α)`", situations.around_scaled),
    Situation("Monitor", "Around `torch.compile(net)`", situations.around_compiled),
    Situation(
        "Monitor", "Dropout and batch-norm in training mode: the run is bit-identical", situations.leaves_the_run_alone
    ),
    Situation(
        "Scaled",
        "A mixture of experts trained at α = 1 is plain training, in float32",
        situations.experts_train_as_plain,
    ),
    Situation(
        "Scaled",
        "Dispatched experts trained at α = 1 are plain training, in float32",
        situations.dispatched_train_as_plain,
    ),
    Situation("Scaled", "Inside of `DistributedDataParallel`", situations.distributed),
    Situation("Monitor", "Around `DistributedDataParallel(net)`", situations.monitor_distributed),
    Situation("Scaled", "After `net.compile()`", situations.compiled_in_place),
    Situation("Scaled", "`copy.deepcopy`, before and after a call", requests.deep_copies),
    Situation("Scaled", "`pickle` and `torch.save`, before and after a call", requests.pickles),
    Situation("Scaled", "`torch.save`, and `torch.load` in another process", requests.across_processes),
    Situation("tangent_kernel", "`together=True`, for samples that depend on each other", requests.whole_batch),
    Situation(
        "tangent_kernel", "A kernel that does not fit into memory", requests.too_large, refused="TB|GB|PB|TiB|PiB"
    ),
    Situation(
        "by_layer",
        "A kernel that does not fit into memory, layer by layer",
        requests.too_large_by_layer,
        refused="TB|GB|PB|TiB|PiB",
    ),
    Situation("spectrum", "All eigenvalues of a kernel that does not fit", requests.too_large_spectrum, refused="top="),
    Situation("tangent_kernel", '`memory="1GB"`', requests.memory_text),
    Situation("relative_scale", "Targets as a NumPy array", requests.numpy_targets),
    Situation("gradient_descent", "Class indices of which some are ignored", requests.ignored_targets),
    Situation("relative_scale", "Class indices stand for one-hot targets", requests.class_targets),
    Situation("Model", "A Hugging Face output without `output=`", requests.missing_output, refused="output="),
    Situation("Scaled", "Dropout in training mode", requests.training_mode, refused=r"net\.eval\(\)"),
    Situation("tangent_kernel", "Integers where the model needs floats", requests.integers, refused=r"x\.to\("),
    Situation("TangentOperator", "NaN in the inputs", requests.not_a_number, refused="NaN"),
    Situation(
        "Model", "Mixtral with grouped products in float64, which torch lacks", requests.grouped, refused="got Double"
    ),
    Situation("tangent_kernel", "TF32 on a GPU: its rounding is not taken for dependence", requests.tensor_cores),
]
