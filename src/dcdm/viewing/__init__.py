"""What people look at, in terminals and pages.

Parts: palette, page (the one skeleton of all pages), tables, plots. What is shown: chunks (of a text), filling (of
blanks), report (of runs). Where: terminal, pages.
"""
