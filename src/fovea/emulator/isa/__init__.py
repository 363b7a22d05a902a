"""The instruction set: one module per family of instructions, and their registry.

Lives here: what a family module needs to register its forms. Not here: the registry itself
(`registry.py`), operand access (`instruction.py`).
"""

# `instruction` the decorator hides `instruction` the submodule, which `sys.modules` keeps: the
# submodule is imported first, because importing it sets the attribute of the same name.
from fovea.emulator.isa.instruction import Instruction
from fovea.emulator.isa.registry import EVIDENCE, entries, find, instruction, load_families

__all__ = ["EVIDENCE", "Instruction", "entries", "find", "instruction", "load_families"]
