"""EAGLE's algorithms in plain NumPy, written from the papers and the published checkpoints.

An oracle for tests: no cache, no batch, no tree attention and no import of the library. Every
quantity is computed anew from the whole prefix in float64. Weights carry the names and layouts of
the published checkpoints ([out, in]).
"""
