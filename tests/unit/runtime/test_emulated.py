"""Arguments of `runtime.emulated.emulate`; what its kernels compute is tested in tests/emulated."""

import pytest
import torch

from fovea.arch import arch_named
from fovea.problem import Request, make_dense
from fovea.runtime.emulated import emulate

WRONG = {
    "text": ({"num_sms": "a"}, TypeError, "num_sms='a'"),
    "None": ({"num_sms": None}, TypeError, "num_sms=None"),
    "float": ({"num_sms": 1.5}, TypeError, r"num_sms=1\.5"),
    "bool": ({"num_sms": True}, TypeError, "num_sms=True"),
    "none": ({"num_sms": 0}, ValueError, "num_sms=0"),
    "too many": ({"num_sms": 2**40}, ValueError, "num_sms=1099511627776"),
    "no parts": ({"splits": 0}, ValueError, "splits=0"),
    "negative parts": ({"splits": -1}, ValueError, "splits=-1"),
    "parts in text": ({"splits": "2"}, TypeError, "splits='2'"),
    "parts of unpacked heads": ({"splits": 3}, ValueError, "splits=3 .*packs no heads"),
}


@pytest.mark.parametrize("name", WRONG)
def test_count_that_is_wrong_raises_and_names_itself(name):
    options, kind, message = WRONG[name]
    q = torch.zeros(1, 256, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(kind, match=message) as caught:
        emulate(make_dense(q, q, q, Request()), arch_named("sm90"), **options)
    assert "allowed: " in str(caught.value)
