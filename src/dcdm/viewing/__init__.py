"""What people look at, in terminals and pages.

Parts: palette, tables, plots. What is shown: chunks (of a text), filling (of blanks), report (of runs). Where:
terminal, pages (which have one skeleton).
"""
