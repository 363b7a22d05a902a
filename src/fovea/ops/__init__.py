"""The operators of fovea, their derivatives, and how a problem reaches them.

Importing this package registers schemas, fakes and autograd formulas, and nothing that pulls in
triton or inductor: the FLOP formula and the sharding rule come with the first call that could use
them (`watchers.py`).
"""

from fovea.ops.call import attend
from fovea.ops.warm import Passed
from fovea.ops.warm import attend as attend_again

__all__ = ["Passed", "attend", "attend_again"]
