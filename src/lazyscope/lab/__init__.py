"""The lab: runs trials, stores each as it ends, draws the figure, judges the claims, writes the report."""

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials

__all__ = ["Claim", "Experiment", "Params", "Result", "Trial", "Trials"]
