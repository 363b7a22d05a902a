"""Which tiles of the score matrix exist, who takes them and in what order.

Lives here: block lists and their construction, tile ranges, tile order, split and page
arithmetic. Does not live here: what a mod means (``mods/``), which tile size is chosen
(``plan/``), validation of user arguments (``problem.py``).
"""
