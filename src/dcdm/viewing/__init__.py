"""What people look at, in terminals and pages.

Parts: palette, tables. What is shown: chunks (of a text), filling (of blanks), report (of runs). Where: terminal,
pages (which share one skeleton, and have charts).
"""
