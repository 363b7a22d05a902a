"""Device code in CuTe-DSL, by architecture, pass and role; read `README.md` here first."""
