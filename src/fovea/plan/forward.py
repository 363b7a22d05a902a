"""What a forward kernel's plan is, whatever the architecture.

Lives here: the union of the plans, for those who only carry or report them. Not here: the plans
themselves (`sm90.py`, `sm100.py`). Invariant: what is read off the union exists in every plan.
"""

from fovea.plan import sm90, sm100

ForwardPlan = sm90.ForwardPlan | sm100.ForwardPlan
