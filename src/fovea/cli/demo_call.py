"""The call that `fovea demo` shows: ALiBi, a sliding window and a document mask.

Lives here: the lines that are both printed and run, and the inputs they run on. Invariant: the text
on the screen is the source of what was executed.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import fovea
from fovea.cli.call import Call, Shape

ScoreMod = Callable[..., Tensor]

# The call's own line, printed below the mods.
CALL_LINE = "out = fovea.attention(q, k, v, score_mod=bias, block_mask=blocks)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCall:
    """Inputs and mods of the demo at one size.

    Shapes:
        q, k, v: (1, seqlen, heads, head_dim); slope: (heads,).
        document: (seqlen,), the document of each token.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    slope: Tensor
    document: Tensor
    window: int
    bias: ScoreMod
    blocks: BlockMask
    text: str

    @property
    def keywords(self) -> dict[str, Any]:
        """What the call passes to fovea.attention beside q, k and v."""
        return {"score_mod": self.bias, "block_mask": self.blocks}

    def run(self) -> Tensor:
        """Return the output on the backend that fovea chooses."""
        attention = cast(Callable[..., Tensor], fovea.attention)  # keywords from a dict
        return attention(self.q, self.k, self.v, **self.keywords)

    def mods_for(self, slope: Tensor) -> tuple[ScoreMod, BlockMask]:
        """Return the same mods with another tensor of slopes."""
        return alibi_window_document(slope, self.document, self.window)


def make_call(shape: Shape, window: int, device: torch.device) -> DemoCall:
    """Return the demo's call: documents of uneven length, one slope a head, bf16."""
    call = Call(shape=shape, dtype=torch.bfloat16, keywords={})
    q, k, v = call.make_inputs(device)
    # Document lengths 3 : 5 : 1 : 7, so that borders fall inside tiles.
    border = torch.tensor([3, 8, 9], device=device) * shape.seqlen_q // 16
    document = torch.bucketize(torch.arange(shape.seqlen_q, device=device), border, right=True)
    slope = 2.0 ** -(torch.arange(shape.heads_q, device=device) * 8 / shape.heads_q + 1)
    bias, blocks = alibi_window_document(slope, document, window)
    text = f"{call.shape} bf16, window {window}, 4 documents"
    return DemoCall(
        q=q,
        k=k,
        v=v,
        slope=slope,
        document=document,
        window=window,
        bias=bias,
        blocks=blocks,
        text=text,
    )


def alibi_window_document(
    slope: Tensor, document: Tensor, window: int
) -> tuple[ScoreMod, BlockMask]:
    """Return the demo's score_mod and block mask.

    Shapes:
        slope: (heads,); document: (seqlen,), the document of each token.
    """
    doc, seqlen, device = document, len(document), document.device

    # begin shown
    def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - slope[h] * (i - j)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j < window) & (doc[i] == doc[j])

    blocks = fovea.create_block_mask(mask, None, None, seqlen, seqlen, device)
    # end shown
    return bias, blocks


def shown_source() -> str:
    """Return the lines of the mods as they stand above, without the type annotations."""
    source = inspect.getsource(alibi_window_document)
    shown = source.partition("# begin shown\n")[2].partition("    # end shown")[0]
    plain = textwrap.dedent(shown).replace(": Any", "").replace(" -> Any", "")
    return "\n".join(line for line in plain.splitlines() if line.strip()) + f"\n{CALL_LINE}"
