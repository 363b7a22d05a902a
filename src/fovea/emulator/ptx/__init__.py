"""PTX text to syntax tree to module. It knows no machine."""
