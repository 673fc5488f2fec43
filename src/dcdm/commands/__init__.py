"""The verbs of the command line, and `options.py` for what they share.

A command reads its options, puts the parts of other packages together and prints; this is the only package that may
import all others. Heavy imports stand inside functions, so that `dcdm --help` is fast.
"""
