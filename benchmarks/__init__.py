"""Benchmarks: each case in a process of its own, its numbers as JSON with the machine beside them.

``python -m benchmarks`` runs all of them and writes ``benchmarks/results`` and
``benchmarks/RESULTS.md``; ``python -m benchmarks --quick`` only shows that they run.
"""
