"""The report on a model that the user brings: is it lazy, why, and what would change it?"""

from lazyscope.inspect.budget import Budget
from lazyscope.inspect.inspection import inspect
from lazyscope.inspect.report import Report
from lazyscope.inspect.verdict import Verdict, Word

__all__ = ["Budget", "Report", "Verdict", "Word", "inspect"]
