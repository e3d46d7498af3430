"""The lab runs the trials of experiments, stores their results, draws figures, checks claims and writes the report."""

from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trial, Trials

__all__ = ["Claim", "Experiment", "Params", "Result", "Trial", "Trials"]
