"""A call of fovea.attention as the command line writes it.

Lives here: `B1 H16 Hkv4 S8192 D128 bf16` and the options that several subcommands share, turned
into tensors and keywords. What a keyword means and whether it is right is `problem/`'s matter.
Invariant: the words are those of the benchmark tables, so the shape of a row can be pasted here; a
row's mod is an option.
"""

import ast
import difflib
import importlib.util
import inspect
import os
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import fovea
from fovea import mods
from fovea.errors import invalid

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
WORDS = (
    "B H Hkv S Skv D Dv, each followed by its number, and a dtype: "
    "B1 H16 Hkv4 S8192 D128 " + " | ".join(DTYPES) + "; as in benchmark tables H16/4, Sq1 S8192 "
    "(queries, keys), full | causal"
)
MASKS = ("full", "causal")


class Size(NamedTuple):
    """A word's letters stand for a size of a call.

    Attributes:
        field: of `Shape`.
        follows: the letters whose number it has where only theirs is given.
    """

    field: str
    meaning: str
    follows: str | None = None


SIZES = {
    "B": Size("batch", "batch entries"),
    "H": Size("heads_q", "query heads, a multiple of Hkv"),
    "Hkv": Size("heads_kv", "key and value heads", "H"),
    "S": Size("seqlen_q", "queries, of each batch entry"),
    "Skv": Size("seqlen_kv", "keys, of each batch entry", "S"),
    "D": Size("head_dim", "columns of a head of q and k"),
    "Dv": Size("head_dim_v", "columns of a head of v", "D"),
}
_WORD = re.compile(rf"({'|'.join(sorted(SIZES, key=len, reverse=True))})(\d+)")
DEFAULT_DTYPE = "bf16"
LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a dense call."""

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int

    def __str__(self) -> str:
        words = [f"B{self.batch}", f"H{self.heads_q}"]
        words += [f"Hkv{self.heads_kv}"] if self.heads_kv != self.heads_q else []
        words += [f"S{self.seqlen_q}"]
        words += [f"Skv{self.seqlen_kv}"] if self.seqlen_kv != self.seqlen_q else []
        words += [f"D{self.head_dim}"]
        words += [f"Dv{self.head_dim_v}"] if self.head_dim_v != self.head_dim else []
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of fovea.attention on random inputs.

    Attributes:
        keywords: those that the command line named, for fovea.attention as they are.
    """

    shape: Shape
    dtype: torch.dtype
    keywords: dict[str, Any]

    def with_block_mask(self, device: torch.device) -> "Call":
        """Return the call with a block mask of its mask mod in the mod's place, if it has one."""
        mask_mod = self.keywords.get("mask_mod")
        if mask_mod is None:
            return self
        lengths = (self.shape.seqlen_q, self.shape.seqlen_kv)
        blocks = fovea.create_block_mask(mask_mod, None, None, *lengths, device)
        keywords = {name: value for name, value in self.keywords.items() if name != "mask_mod"}
        return replace(self, keywords={**keywords, "block_mask": blocks})

    @property
    def has_mods(self) -> bool:
        """Whether it asks for more than causal attention."""
        return bool(set(self.keywords) - {"causal"})

    def __str__(self) -> str:
        names = [name for name, dtype in DTYPES.items() if dtype == self.dtype]
        is_top_left = self.keywords.get("causal") == "top_left"
        options = [
            "causal-top-left" if name == "causal" and is_top_left else name
            for name in self.keywords
        ]
        return " ".join([str(self.shape), *names, *options])

    def make_inputs(self, device: torch.device, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return random normal q, k and v, the same for the same seed.

        Shapes: (batch, seqlen_q, heads_q, head_dim), (batch, seqlen_kv, heads_kv, head_dim) and
        (batch, seqlen_kv, heads_kv, head_dim_v).
        """
        generator = torch.Generator(device=device).manual_seed(seed)
        shape = self.shape
        self._check_memory(device)

        def normal(seqlen: int, heads: int, head_dim: int) -> Tensor:
            size = (shape.batch, seqlen, heads, head_dim)
            return torch.randn(size, generator=generator, device=device).to(self.dtype)

        return (
            normal(shape.seqlen_q, shape.heads_q, shape.head_dim),
            normal(shape.seqlen_kv, shape.heads_kv, shape.head_dim),
            normal(shape.seqlen_kv, shape.heads_kv, shape.head_dim_v),
        )

    def _check_memory(self, device: torch.device) -> None:
        """Raise ValueError where the inputs are beyond the memory of the device's machine."""
        shape = self.shape
        rows = shape.seqlen_q * shape.heads_q * shape.head_dim
        rows += shape.seqlen_kv * shape.heads_kv * (shape.head_dim + shape.head_dim_v)
        needed = 4 * shape.batch * rows  # drawn in float32
        if device.type == "cuda":
            there = int(cast(Any, torch.cuda).get_device_properties(device).total_memory)
        else:
            there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > there:
            raise ValueError(
                invalid(
                    "CALL",
                    f"'{shape}', whose inputs take {needed / 2**30:.0f} GiB,",
                    f"inputs within the {there / 2**30:.0f} GiB of this machine's {device.type}",
                    "write smaller sizes",
                )
            )


DEFAULT = Shape(
    batch=1, heads_q=16, heads_kv=16, seqlen_q=4096, seqlen_kv=4096, head_dim=128, head_dim_v=128
)
# One tile and a ragged rest: large enough for a pipeline to turn over, small enough to be quick.
EMULATED = Shape(
    batch=1, heads_q=1, heads_kv=1, seqlen_q=200, seqlen_kv=200, head_dim=64, head_dim_v=64
)


def words_help(default: Shape) -> str:
    """Return what `--help` says of CALL."""
    return f"{WORDS}, in any order (default: {default} {DEFAULT_DTYPE}; Hkv, Skv, Dv as H, S, D)."


def parse_words(words: Sequence[str], default: Shape) -> tuple[Shape, torch.dtype]:
    """Return the shape and dtype that the words name; what they leave out comes from the default.

    Hkv, Skv and Dv default to H, S and D where those are given; H16/4 is H16 Hkv4, and beside Sq1
    S counts keys.

    Raises:
        ValueError: a word is not of that form, or comes twice.
    """
    given: dict[str, int] = {}
    dtypes = [word for word in words if word in DTYPES] or [DEFAULT_DTYPE]
    if len(dtypes) > 1:
        raise ValueError(invalid("CALL", repr(" ".join(dtypes)), "one dtype", "name it once"))
    for word in _written_out(words):
        if word in DTYPES:
            continue
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(invalid("CALL", repr(word), WORDS, _hint(word)))
        if match[1] in given:
            raise ValueError(invalid("CALL", repr(word), WORDS, f"write {match[1]} once"))
        if int(match[2]) > LARGEST:
            allowed = f"a number up to {LARGEST}, in which kernels count"
            raise ValueError(invalid("CALL", repr(word), allowed, "write a smaller one"))
        given[match[1]] = int(match[2])

    sizes = {size.field: _size_of(word, given, default) for word, size in SIZES.items()}
    return Shape(**sizes), DTYPES[dtypes[0]]


def _written_out(words: Sequence[str]) -> list[str]:
    """Return the words with those of a benchmark table's own form as the plain ones."""
    found: list[str] = []
    has_queries = any(re.fullmatch(r"Sq\d+", word) for word in words)
    for word in words:
        heads = re.fullmatch(r"(H\d+)/(\d+)", word)
        length = re.fullmatch(r"(Sq|S)(\d+)", word)
        if heads is not None:
            found += [heads[1], f"Hkv{heads[2]}"]
        elif has_queries and length is not None:
            found.append(f"{'S' if length[1] == 'Sq' else 'Skv'}{length[2]}")
        else:
            found.append(word)
    return found


def take_mask(words: Sequence[str], causal: bool | None) -> tuple[list[str], bool | None]:
    """Return the words without `full` and `causal`, and --causal as these say it.

    Raises:
        ValueError: several of them, or one beside --causal.
    """
    named = [word for word in words if word in MASKS]
    if not named:
        return list(words), causal
    if len(named) > 1 or causal is not None:
        allowed = "one of full, causal, --causal and --causal-top-left"
        raise ValueError(invalid("CALL", repr(" ".join(named)), allowed, "leave the others out"))
    return [word for word in words if word not in MASKS], True if named[0] == "causal" else None


def _size_of(word: str, given: dict[str, int], default: Shape) -> int:
    """Return a word's number, or that of the word that it follows, or the default's."""
    follows = SIZES[word].follows
    if word not in given and follows is not None and follows in given:
        word = follows
    return given[word] if word in given else getattr(default, SIZES[word].field)


def _hint(word: str) -> str:
    """Return what to do about a word that is not understood."""
    plain = word.lower().replace("-", "_")
    if plain in ("top_left", "topleft"):
        return "give --causal-top-left in the place of --causal"
    if plain in ("bottom_right", "bottomright"):
        return "give --causal alone, which is aligned bottom right"
    window = re.fullmatch(r"window(\d+)", plain)
    if window is not None:
        return f"give --window {int(window[1]) - 1},0"
    if plain in ("pages", "packed", "varlen"):
        return "give --packed, and --page-size N for pages"
    if plain in mods.__all__ or plain in ("sinks", "natten"):
        return "a mod is an option: give --mask-mod, --score-mod or --softcap"
    names = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
    if names.get(plain, plain) in DTYPES:
        return f"write {names.get(plain, plain)}"
    match = re.fullmatch(r"([a-z]+)[_=]?(\d+)", plain)
    for size in SIZES:
        if match is not None and match[1] == size.lower() and f"{size}{match[2]}" != word:
            return f"write {size}{match[2]} (case matters)"
    return "write the letters of a size and its number, such as S8192, or a dtype"


def parse_window(text: str | None) -> tuple[int | None, int | None] | None:
    """Return the window written as LEFT,RIGHT, where `-` stands for unlimited.

    Raises:
        ValueError: not of that form.
    """
    if text is None:
        return None
    sides = text.split(",")
    if len(sides) != 2 or not all(side == "-" or side.isdecimal() for side in sides):
        allowed = "LEFT,RIGHT with - for unlimited, such as 1023,0"
        raise ValueError(invalid("--window", repr(text), allowed, "write both sides"))
    left, right = (None if side == "-" else int(side) for side in sides)
    return left, right


def parse_mod(option: str, text: str | None) -> Callable[..., Any] | None:
    """Return the mod that an option names.

    `NAME` or `NAME(ARGUMENTS)` is a member of fovea.mods, as it is or called with literal
    arguments; `FILE.py:` before it takes it from the user's file.

    Raises:
        ValueError: no such mod, one that lacks its arguments, or arguments that are no literals.
    """
    if text is None:
        return None
    path, is_file, expression = text.partition(".py:")
    module = _load_file(option, Path(path + ".py")) if is_file else mods
    try:
        node = ast.parse(expression if is_file else text, mode="eval").body
        if isinstance(node, ast.Name):
            return _taken_as_it_is(option, text, _member(option, module, node.id))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError
        arguments = [ast.literal_eval(argument) for argument in node.args]
        keywords = {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
    except (SyntaxError, ValueError) as error:
        if str(error).startswith(option):
            raise
        allowed = "NAME or NAME(ARGUMENTS) from fovea.mods, or FILE.py: and the same"
        raise ValueError(invalid(option, repr(text), allowed, _LITERALS)) from error
    maker = _member(option, module, node.func.id)
    try:
        mod = maker(*arguments, **keywords)
    except Exception as error:
        if is_file:
            raise ValueError(_failure(option, text, Path(path + ".py"), error)) from error
        if not isinstance(error, TypeError | AttributeError):
            raise
        allowed = f"{node.func.id}{inspect.signature(maker)}"
        raise ValueError(invalid(option, repr(text), allowed, _LITERALS)) from error
    if callable(mod):
        _check_kind(option, text, mod)
    return mod


_LITERALS = (
    "give numbers and other literals as arguments; a mod that needs a tensor goes into a file of "
    "yours, as a function there: FILE.py:NAME"
)


_INDICES = ("b", "h", "q_idx", "kv_idx")
_KINDS = {"--score-mod": ("score", *_INDICES), "--mask-mod": _INDICES}


def _taken_as_it_is(option: str, text: str, mod: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mod, unless it is a function that makes one."""
    _check_kind(option, text, mod)
    signature = inspect.signature(mod)
    names = _KINDS.get(option, _INDICES)
    if not _takes(signature, names):
        allowed = f"a function ({', '.join(names)})"
        own = ", ".join(signature.parameters)
        way_out = f"if it makes one, write its arguments too: '{text}(...)', which are ({own})"
        raise ValueError(invalid(option, repr(text), allowed, way_out))
    return mod


def _check_kind(option: str, text: str, mod: Callable[..., Any]) -> None:
    """Raise ValueError where a mod has the arguments of the other kind."""
    signature = inspect.signature(mod)
    names = _KINDS.get(option, _INDICES)
    if _takes(signature, names):
        return
    is_mod = {"b", "h"} <= set(signature.parameters)  # a function that makes one has other names
    for other, others in _KINDS.items():
        if is_mod and other != option and _takes(signature, others):
            allowed = f"a function ({', '.join(names)})"
            way_out = f"it takes ({', '.join(others)}): give it as {other} '{text}'"
            raise ValueError(invalid(option, repr(text), allowed, way_out))


def _takes(signature: inspect.Signature, names: Sequence[str]) -> bool:
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


def _load_file(option: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(invalid(option, repr(str(path)), "a Python file", "check the path"))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(_failure(option, str(path), path, error)) from error
    return module


def _failure(option: str, text: str, path: Path, error: BaseException) -> str:
    """Return the text of an error about what went wrong in the user's own file."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    lines = [line for name, line in places if Path(name).absolute() == path.absolute()]
    where = f"line {lines[-1]} of {path}" if lines else f"{path}, or what it is given"
    got = f"{type(error).__name__}: {error}"
    return invalid(option, repr(text), "a Python file that runs", f"correct {where} ({got})")


def _member(option: str, module: ModuleType, name: str) -> Callable[..., Any]:
    member = getattr(module, name, None)
    if not callable(member):
        names = getattr(module, "__all__", None) or [
            known for known, value in vars(module).items() if inspect.isfunction(value)
        ]
        near = difflib.get_close_matches(name, names, n=3)
        way_out = f"write {' or '.join(near)}" if near else "name one of them"
        where = "a name in fovea.mods (docs/mods.md lists them)"
        if not near:
            where = f"a name in fovea.mods: {', '.join(names)}"
        allowed = where if module is mods else " | ".join(names)
        raise ValueError(invalid(option, repr(name), allowed, way_out))
    return member
