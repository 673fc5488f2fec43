"""The paper's tables and figures as experiments: at CPU scale they run, at the paper's they are spelled out.

In order: scale, variants and experiments say what is run; results, measures and run how, and where figures are
kept; claims, tables, plots and report what follows from them.
"""
