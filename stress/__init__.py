"""Soak runs with fault injection: ``python -m stress --help``. Nothing of it is shipped.

A seed draws a *plan*: faults on a time axis. A *layer* is what they are done to: a runtime with
its tiers, the same over a filesystem that misbehaves, a whole vLLM server. A *checker* looks at
all that the layer serves. ``record`` notes what went on, for the verdict and its page.
"""
