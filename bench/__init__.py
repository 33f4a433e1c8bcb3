"""The benchmark suite: what the manager costs its engine, compiled and interpreted, and how that grows.

Rule: everything is measured in worker processes, each on one build (see `builds.py`); the process that starts them knows the
operations by their titles only. Figures are compared within one run on one machine, never with a threshold: a run states its
machine.
"""
