"""The options that subcommands share, spelled once.

Lives here: their typer declarations and `read_call`, which turns them into a `Call`. Invariant: an
option that is not given leaves no keyword, so fovea.attention's own default holds.
"""

from typing import Annotated, Any

import torch
import typer

from fovea.arch import ARCHS, Arch, arch_named
from fovea.cli.call import (
    DEFAULT,
    Call,
    Shape,
    parse_mod,
    parse_window,
    parse_words,
    take_mask,
    words_help,
)
from fovea.dispatch import BACKENDS
from fovea.errors import invalid


def words_argument(default: Shape) -> Any:
    """Return the declaration of CALL, which says what is taken for words left out."""
    return typer.Argument(metavar="CALL", help=words_help(default), show_default=False)


Words = Annotated[list[str] | None, words_argument(DEFAULT)]
Causal = Annotated[
    bool | None,
    typer.Option(
        "--causal/--causal-top-left",
        help="Causal mask, aligned bottom right, or top left as torch's is_causal.",
        show_default=False,
    ),
]
Window = Annotated[
    str | None,
    typer.Option(metavar="LEFT,RIGHT", help="Keys visible on each side; - is unlimited."),
]
Softcap = Annotated[
    float | None, typer.Option(metavar="C", help="Scores become C * tanh(score / C).")
]
ScoreMod = Annotated[
    str | None,
    typer.Option(metavar="MOD", help="NAME(ARGUMENTS) of fovea.mods, or FILE.py:NAME(...)."),
]
MaskMod = Annotated[
    str | None,
    typer.Option(metavar="MOD", help="NAME(ARGUMENTS) of fovea.mods, or FILE.py:NAME(...)."),
]
BlockMask = Annotated[
    bool,
    typer.Option("--block-mask", help="Make a block mask of the mask mod first, as bench does."),
]
Backend = Annotated[str | None, typer.Option(metavar="NAME", help=" | ".join(BACKENDS) + ".")]


def with_block_mask(call: Call, device: torch.device, is_wanted: BlockMask) -> Call:
    """Return the call with a block mask of its mask mod where --block-mask asks for one.

    Raises:
        ValueError: there is no mask mod to make it of.
    """
    if not is_wanted:
        return call
    if "mask_mod" not in call.keywords:
        raise ValueError(
            invalid("--block-mask", "given", "given with --mask-mod", "add --mask-mod, or leave it")
        )
    return call.with_block_mask(device)


def read_arch(text: str) -> Arch:
    """Return the architecture of `sm90`, or of a compile target: `sm_90a`, `sm90a`.

    Raises:
        ValueError: no such architecture.
    """
    plain = text.lower().replace("_", "")
    return arch_named(plain[:-1] if plain[:-1] in ARCHS and plain[-1] in "af" else plain)


def read_call(
    words: list[str] | None,
    causal: Causal,
    window: Window,
    softcap: Softcap,
    mods: tuple[str | None, str | None],
    *,
    default: Shape = DEFAULT,
) -> Call:
    """Return the call that a subcommand's options describe.

    Raises:
        ValueError: a word or an option that cannot be read.
    """
    words, causal = take_mask(words or [], causal)
    shape, dtype = parse_words(words, default)
    named = {
        "causal": None if causal is None else causal or "top_left",
        "window": parse_window(window),
        "softcap": softcap,
        "score_mod": parse_mod("--score-mod", mods[0]),
        "mask_mod": parse_mod("--mask-mod", mods[1]),
    }
    keywords = {name: value for name, value in named.items() if value is not None}
    return Call(shape=shape, dtype=dtype, keywords=keywords)
